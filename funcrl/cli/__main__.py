"""`python -m funcrl.cli`, for where the command `funcrl` is not on the path."""

from funcrl.cli.program import main

main()
