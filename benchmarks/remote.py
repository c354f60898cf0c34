"""Time the conversion of a checkpoint on a server of the same machine, with iqforge's range client
and with the HTTP session of huggingface_hub in its place.

    python benchmarks/remote.py --gigabytes 1 --dir /dev/shm --outtype bf16

Writes a synthetic bf16 checkpoint, then runs `iqforge convert --remote` on it in separate
processes, alternately --rounds times. The server is another process, that of tests/hub_server.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).resolve().parent


def serve(folder: Path, address: Connection) -> None:
    """Serve `folder` as a Hub, send its address through the connection, and stop at the first
    answer.
    """
    sys.path.insert(0, str(HERE.parent / "tests"))
    from hub_server import Hub  # pyright: ignore[reportMissingImports]  beside the package

    with Hub(folder) as hub:
        address.send(hub.endpoint)
        address.recv()


def convert(client: str, out: Path, outtype: str) -> int:
    """Convert with one of the clients, in this process."""
    from iqforge.cli import main
    from iqforge.convert.hub import http_ranges

    if client == "huggingface_hub":
        from huggingface_hub.utils import get_session

        def get_range(self, url, start, stop, known=None):
            headers = {**self._headers, "Range": f"bytes={start}-{stop - 1}"}
            response = get_session().get(url, headers=headers, follow_redirects=True)
            data = response.raise_for_status().content
            size = int(response.headers["Content-Range"].rpartition("/")[2])
            return http_ranges.FileRange(data, size, response.headers.get("ETag") or "")

        http_ranges.RangeClient.get_range = get_range
    return main(["convert", "--remote", "org/model", "--outfile", str(out), "--outtype", outtype])


def measure(client: str, endpoint: str, folder: Path, outtype: str) -> str:
    """Convert the checkpoint once in a new process. Return two cells of Markdown: seconds, and CPU
    seconds.
    """
    out = folder / "out.gguf"
    command = [sys.executable, __file__, "--client", client, "--out", str(out)]
    environment = {**os.environ, "HF_ENDPOINT": endpoint}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [*command, "--outtype", outtype], env=environment, check=True, capture_output=True
    )
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    out.unlink()
    return f"{seconds:.2f} | {used:.2f} |"


def main() -> None:
    """Parse the command line, write the checkpoint, and print the times of both clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--outtype", default="bf16")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        sys.exit(convert(args.client, args.out, args.outtype))
    sys.path.insert(0, str(HERE))
    from convert import write_checkpoint  # pyright: ignore[reportAttributeAccessIssue]  beside

    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        (model := folder / "model").mkdir()
        write_checkpoint(model, int(args.gigabytes * 1e9), int(args.gigabytes * 2e8))
        here, there = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(model, there), daemon=True)
        server.start()
        endpoint = here.recv()
        print("| client | seconds | CPU seconds |\n|---|---|---|")
        for _ in range(args.rounds):
            for client in ("iqforge", "huggingface_hub"):
                shown = measure(client, endpoint, folder, args.outtype)
                print(f"| {client} | {shown}", flush=True)
        here.send("done")
        server.join(5)
        server.terminate()


if __name__ == "__main__":
    main()
