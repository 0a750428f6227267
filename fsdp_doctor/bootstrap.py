"""Set up a clone and run it: ``python3 -m fsdp_doctor.bootstrap demo`` or ``... test``.

Makes ``.venv`` in the clone and installs the project there under ``constraints.txt``. A torch that
this Python already has (a GPU build, say) is used as it is and never replaced. Standard library
only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
COMMANDS = {
    "demo": ["-m", "fsdp_doctor", "demo"],
    "test": ["-m", "pytest"],
    "lint": ["-c", "import subprocess as s, sys; sys.exit(sum(s.call([sys.executable, '-m', *c]) "
             "for c in (['ruff', 'check'], ['ruff', 'format', '--check'], ['mypy'])))"],
}  # fmt: skip


def python_of(environment: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return environment / "bin" / "python"


def main(arguments: list[str] | None = None) -> int:
    """Install what is missing, then replace this process by the command."""
    parser = argparse.ArgumentParser(prog="python3 -m fsdp_doctor.bootstrap", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of that command")
    chosen = parser.parse_args(arguments)
    if sys.version_info < (3, 11):  # noqa: UP036 (run by whatever python3 is)
        parser.error(f"Python >= 3.11 is needed, this is {sys.version.split()[0]}")
    install()
    os.chdir(ROOT)
    python = str(python_of(ENVIRONMENT))
    os.execv(python, [python, *COMMANDS[chosen.command], *chosen.rest])  # noqa: S606


def install() -> None:
    """Create ``.venv`` and install the project with its test tools, once per change of the pins."""
    stamp = ENVIRONMENT / "installed"
    wanted = (ROOT / "pyproject.toml").read_text() + (ROOT / "constraints.txt").read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    outer_torch = _outer_torch()
    print(f"setting up {ENVIRONMENT} ...", file=sys.stderr)  # noqa: T201 (before the CLI exists)
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    if outer_torch is not None:
        _share(outer_torch)
    constraints = ENVIRONMENT / "constraints.txt"
    constraints.write_text(_constraints(keep_torch=version("torch") if outer_torch else None))
    command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c"]
    subprocess.run(
        [python_of(ENVIRONMENT), *command, constraints, "-e", f"{ROOT}[all,test,lint]"], check=True
    )
    stamp.write_text(wanted)


def _outer_torch() -> Path | None:
    """Return the folder from which this Python, a virtual environment perhaps, imports torch."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent.parent if found and found.origin else None


def _share(packages: Path) -> None:
    """Let ``.venv`` import from ``packages`` what it has not installed itself."""
    own = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    (own / "outer.pth").write_text(f"{packages}\n")


def _constraints(keep_torch: str | None) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if keep_torch is not None:
        lines = [line for line in lines if not line.startswith("torch==")]
        lines.append(f"torch=={keep_torch}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
