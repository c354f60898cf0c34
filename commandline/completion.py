"""`iqforge completion SHELL`: a script that completes commands and flags in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from ..errors import UsageError
from .help import Listed

SHELLS = ("bash", "zsh", "tcsh")
HELP = """\
Completion of commands and flags. Print a script for your shell and load it:

  bash:  iqforge completion bash > ~/.local/share/bash-completion/completions/iqforge
  zsh:   iqforge completion zsh > ~/.zfunc/_iqforge    (with ~/.zfunc in fpath, before compinit)
  tcsh:  iqforge completion tcsh > ~/.iqforge.tcsh     (and `source ~/.iqforge.tcsh` in ~/.tcshrc)

Then start a new shell. Print it again after an update.
"""


def completion_script(
    shell: str,
    commands: Mapping[str, Listed],
    configure: Callable[[str, argparse.ArgumentParser], object],
) -> str:
    """Return the script for `shell`; `configure(name, parser)` adds the flags of a command. Raise
    UsageError for another shell.
    """
    import shtab

    if shell not in SHELLS:
        raise UsageError(f"completion is for {', '.join(SHELLS)}, not for '{shell}'")
    parser = argparse.ArgumentParser(prog="iqforge")
    parsers = parser.add_subparsers(dest="command")
    for name, command in commands.items():
        one = parsers.add_parser(name, help=command.help, usage="")
        configure(name, one)
        _complete_files(one)
    parsers.add_parser("help", help="the flags of a command")
    parsers.add_parser("version", help="the version")
    return shtab.complete(parser, shell)


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Let every value that is not one of several words complete to file names."""
    import shtab

    for action in parser._actions:
        if action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]  its interface
