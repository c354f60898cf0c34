"""Ctrl-C at any moment: exit status 130, one line, and no output that is not complete."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import iqforge
import pytest

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
# Python's own start cannot be covered: the line says that the program handles signals.
START = """
import iqforge.__main__ as program
listen = program._listen
def listens():
    print('started', flush=True)
    listen()
program._listen = listens
program.run()
"""
MOMENTS = 6


def started(code: str, *words: str) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "started\n"
    return child


def replaced(body: str) -> str:
    """A program whose `main` is this."""
    return (
        "import atexit, os, signal, sys, threading, time\n"
        "import iqforge.__main__ as program\n"
        "import iqforge.cli\n"
        f"def main():\n{body}\n"
        "iqforge.cli.main = main\n"
        "program.run()\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["convert", str(DEMO), "--outfile", "OUT"],
        ["quantize", str(DEMO), "OUT", "IQ4_K"],
    ],
    ids=lambda words: words[0],
)
def test_at_many_moments(words, tmp_path):
    out = tmp_path / "out.gguf"
    words = [str(out) if word == "OUT" else word for word in words]
    for _ in range(2):  # the first compiles what the others find in the cache
        begun = time.monotonic()
        child = started(START, *words)
        child.communicate(timeout=600)
        assert child.returncode == 0
    whole, length, statuses = out.read_bytes(), time.monotonic() - begun, []
    for moment in range(MOMENTS):
        out.unlink(missing_ok=True)
        child = started(START, *words)
        time.sleep(length * moment / MOMENTS)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=600)
        statuses.append(child.returncode)
        assert child.returncode in (0, 130), (moment, child.returncode, err)
        assert "Traceback" not in err and "Exception ignored" not in err, (moment, err)
        if out.exists():
            assert out.read_bytes() == whole
        else:
            assert child.returncode == 130 and "interrupted" in err, (moment, err)
    assert statuses[0] == 130


@pytest.mark.parametrize("ending", ["", "; raise ImportError('there is no such thing')"])
def test_an_interrupt_waits_for_an_import(ending, tmp_path):
    """Modules in C print the exception or make an ImportError of it. An error of the module itself
    is shown as it is.
    """
    module = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('imported')"
    (tmp_path / "slow.py").write_text(module + ending)
    again = 600 if ending else 0.02  # an error ends the program before
    moments = f"    program.AGAIN, program.PATIENCE = {again}, 240\n"
    code = replaced(f"{moments}    import slow\n    time.sleep(60)")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "imported\n"
    if ending:
        assert done.returncode == 1 and "there is no such thing" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (130, "\niqforge: interrupted\n")


def test_an_interrupt_waits_for_imports_of_imports(tmp_path):
    """A module in C imports as well; there is no moment between the two at which to raise."""
    (tmp_path / "inner.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    outer = "import time\ntry:\n    import inner; time.sleep(0.2)\n"
    outer += "except BaseException:\n    print('hidden')"
    (tmp_path / "outer.py").write_text(outer)
    code = replaced("    program.PATIENCE = 240\n    import outer\n    time.sleep(60)")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "\niqforge: interrupted\n"


def test_an_interrupt_that_passes_code_made_from_a_text(tmp_path):
    """Python then ends by the signal, whatever the exit status of a module was to be."""
    code = replaced(
        "    try:\n"
        "        exec('os.kill(os.getpid(), signal.SIGINT)')\n"
        "    except KeyboardInterrupt:\n"
        "        return 130"
    )
    (tmp_path / "program.py").write_text(code)
    words = [sys.executable, "-m", "program"]
    assert subprocess.run(words, cwd=tmp_path, timeout=300).returncode == 130


@pytest.mark.parametrize(
    "ending",
    ["threading.Thread(target=lasts).start()", "atexit.register(lasts)"],
)
@pytest.mark.parametrize("status", [0, 1])
def test_while_the_process_ends(ending, status):
    lasts = (  # the signal has its last handler from when `main` has ended
        "    def lasts():\n"
        "        while signal.getsignal(signal.SIGINT) is not program._leave: time.sleep(0.01)\n"
        "        print('started', flush=True); time.sleep(600)\n"
    )
    child = started(replaced(f"{lasts}    {ending}\n    return {status}"))
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (130, "")


@pytest.mark.parametrize("status", [0, 1])
def test_when_everything_has_ended(status):
    """Python has given the signal its default action by then."""
    late = (
        "    class Late:\n"
        "        def __del__(self, kill=os.kill, pid=os.getpid(), number=int(signal.SIGINT)):\n"
        "            kill(pid, number)\n"
        "    sys.late = Late()\n"
        f"    return {status}"
    )
    assert subprocess.run([sys.executable, "-c", replaced(late)], timeout=300).returncode == status


def test_the_second_ends_a_long_step_of_compiled_code():
    code = (  # no signal interrupts it, for minutes
        "    clock = time.pthread_getcpuclockid(threading.get_ident())\n"
        "    def says():\n"  # that the step has begun: the main thread has worked for so long
        "        while time.clock_gettime(clock) < 0.3 + before: time.sleep(0.01)\n"
        "        print('started', flush=True)\n"
        "    before = time.clock_gettime(clock)\n"
        "    threading.Thread(target=says, daemon=True).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    child = started("import hashlib\n" + replaced(code))
    child.send_signal(signal.SIGINT)
    assert child.stderr is not None and child.stderr.readline() == "\n"
    assert "ends after this step of the computation" in child.stderr.readline()
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (130, "\niqforge: interrupted\n")


def test_the_second_is_raised_where_the_first_was():
    """However long it takes to end: outputs are closed then."""
    nap = "threading.Event().wait(600)"
    code = (
        "    program.PATIENCE = 240\n"
        "    try:\n"
        "        try:\n"
        f"            print('started', flush=True); {nap}\n"
        "        except KeyboardInterrupt:\n"
        f"            print('first', flush=True); {nap}\n"
        "    except KeyboardInterrupt:\n"
        "        print('second', flush=True)\n"
        "    return 130\n"
    )
    child = started(replaced(code))
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None and child.stdout.readline() == "first\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert (child.returncode, out, err) == (130, "second\n", "")


def test_two_that_are_raised_are_not_said_to_wait():
    """However fast the second follows, and however long it takes to end."""
    code = (
        "    program.PATIENCE = 0.2\n"
        "    for _ in range(2):\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt: pass\n"
        "    time.sleep(1)\n"
        "    return 0"
    )
    done = subprocess.run(
        [sys.executable, "-c", replaced(code)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_signals_of_a_forked_process_are_its_own():
    code = (
        "    program.PATIENCE = 0\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        signal.signal(signal.SIGINT, lambda *_: None)\n"
        "        for _ in range(3): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.05)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    time.sleep(0.5)\n"
        "    return 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", replaced(code)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_while_the_command_line_is_imported():
    code = (
        "import builtins, iqforge.__main__ as program\n"
        "usual = builtins.__import__\n"
        "def interrupted(name, *more):\n"
        "    if name == 'cli':\n"
        "        raise KeyboardInterrupt\n"
        "    return usual(name, *more)\n"
        "builtins.__import__ = interrupted\n"
        "program.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "\niqforge: interrupted\n")


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_other_endings_keep_their_status(status):
    returned = replaced(f"    print('said')\n    return {status}")
    raised = replaced(f"    print('said')\n    raise SystemExit({status})")
    for code in (returned, raised):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (status, "said\n", "")


def test_a_signal_that_is_ignored_stays_ignored():
    code = replaced("    time.sleep(0.1)\n    os.kill(os.getpid(), signal.SIGINT)\n    return 0")
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + code
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
