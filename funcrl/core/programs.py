"""How a Python program of our own is started."""

import sys


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this Python, importing nothing from the working directory.

    That holds for the Python programs that it starts, too: the working directory may be a folder
    of somebody else's files.

    Args:
        arguments: of Python, such as "-m" and a module.

    Example:
        >>> import subprocess
        >>> from funcrl.core.programs import python_command
        >>> subprocess.check_output(python_command("-c", "import sys; print(sys.path[0] == '')"))
        b'False\\n'
    """
    return ["env", "PYTHONSAFEPATH=1", sys.executable, *arguments]
