"""What a run does: it builds its parts, draws, trains, evaluates and exports."""
