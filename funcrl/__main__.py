"""`python -m funcrl`, for where the command `funcrl` is not on the path, as under torchrun."""

from funcrl.cli import main

main()
