"""Time reading ranges of a file from a server on the same machine, with iqforge's client and with
the HTTP session of huggingface_hub.

    python benchmarks/ranges.py

It reads ranges of 4 MiB over several connections, as a conversion from the Hub does, and prints the
seconds and the CPU seconds of the reading process for each round. The server is another process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

from huggingface_hub.utils import get_session
from iqforge.convert.hub.checkpoint import BLOCK_BYTES, CONNECTIONS
from iqforge.convert.hub.http_ranges import RangeClient


class Handler(BaseHTTPRequestHandler):
    """Serve ranges of a file of zeros, of any size, over connections that are kept open."""

    protocol_version = "HTTP/1.1"
    size, zeros = 0, bytes(BLOCK_BYTES)

    def do_GET(self) -> None:
        """Answer a range request with zeros."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert match is not None
        first, last = int(match[1]), min(int(match[2]), self.size - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{self.size}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        self.wfile.write(memoryview(self.zeros)[: last - first + 1])

    def log_message(self, format: str, *args) -> None:
        """Print nothing."""


def serve(size: int, port: Connection) -> None:
    """Serve a file of `size` zeros on a free port, which is sent to `port`."""
    Handler.size = size
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    server.serve_forever()


def measure(url: str, size: int, connections: int, read: Callable[[str, int, int], bytes]) -> str:
    """Return the cells of one way to read: seconds, and CPU seconds of this process."""

    def length(start: int) -> int:
        return len(read(url, start, min(start + BLOCK_BYTES, size)))

    begin, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(connections) as pool:
        n_bytes = sum(pool.map(length, range(0, size, BLOCK_BYTES)))
    assert n_bytes == size
    return f"{time.perf_counter() - begin:.2f} | {time.process_time() - used:.2f} |"


def main() -> None:
    """Read a local server in each way, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    client, session = RangeClient({}), get_session()

    def with_session(url: str, start: int, stop: int) -> bytes:
        response = session.get(url, headers={"Range": f"bytes={start}-{stop - 1}"})
        return response.raise_for_status().content

    readers = {
        "iqforge": lambda url, start, stop: client.get_range(url, start, stop).data,
        "huggingface_hub": with_session,
    }
    size, (here, there) = args.megabytes * 10**6, multiprocessing.Pipe()
    print("| client | seconds | CPU seconds |\n|---|---|---|")
    for _ in range(args.rounds):
        for name, read in readers.items():
            server = multiprocessing.Process(target=serve, args=(size, there), daemon=True)
            server.start()
            url = f"http://127.0.0.1:{here.recv()}/file"
            print(f"| {name} | {measure(url, size, args.connections, read)}", flush=True)
            server.terminate()
            server.join()


if __name__ == "__main__":
    main()
