"""Reward functions of a user's own: how they are called, and what is said when one fails."""
