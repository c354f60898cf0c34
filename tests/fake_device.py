"""A device in numpy, with the interfaces of `CudaDevice` and `CudaEncoder`."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import numpy as np
from iqforge.errors import IqforgeError
from iqforge.formats.codecs.codec import decode
from iqforge.quantize.encode import row_encoder


class FakeEncoder:
    """The CPU's search with the interface of `CudaEncoder`."""

    def __init__(self, type, n_cols, weighted):
        self.type, self.n_cols, self.weighted = type, n_cols, weighted

    def arrays(self, rows, new):
        blocks = self.n_cols // self.type.block_size
        results = [((rows * blocks, self.type.block_bytes), np.uint8)]
        if self.type.header_bytes:
            results = [
                ((rows, self.type.header_bytes), np.uint8),
                ((rows, blocks, self.type.block_bytes), np.uint8),
            ]
        return [new((rows, self.n_cols), np.float32), *(new(*result) for result in results)]

    def launch(self, arrays, stream, weights):
        assert (weights is None) == (not self.weighted)
        x = arrays[0]
        out = np.empty((len(x), self.type.row_bytes(self.n_cols)), dtype=np.uint8)
        row_encoder(self.type, self.n_cols, weights)(x, out)
        if head := self.type.header_bytes:
            arrays[1][...] = out[:, :head]
        arrays[-1][...] = out[:, head:].reshape(arrays[-1].shape)


class FakeDevice:
    """A `CudaDevice` in numpy, which works at once or after a random delay. Memory is filled with
    garbage when it is allocated.
    """

    def __init__(self, name="fake:0", fail_at=None):
        self.name, self.fail_at, self.busy, self.most, self.count = name, fail_at, 0, 0, 0
        self.lock, self.random = threading.Lock(), random.Random(1)

    @contextlib.contextmanager
    def context(self):
        with self.lock:
            self.busy, self.count = self.busy + 1, self.count + 1
            self.most = max(self.most, self.busy)
        try:
            yield
        finally:
            with self.lock:
                self.busy -= 1

    def stream(self):
        return object()

    def wait(self, stream):
        time.sleep(self.random.random() / 200)
        if self.fail_at is not None and self.count >= self.fail_at:
            raise IqforgeError(f"{self.name} fell off the bus")

    def pinned(self, n_bytes):
        return np.full(n_bytes, 0xAA, dtype=np.uint8)

    memory = pinned

    def upload(self, host, target, stream):
        target[...] = host

    def download(self, source, host, stream):
        host[...] = source

    def encoder(self, type, n_cols, weighted):
        return FakeEncoder(type, n_cols, weighted)

    def widen(self, name, raw, x, found, stream):
        values = decode(name, raw.view(np.uint8)[None], len(raw))[0]
        bad = np.nonzero(~np.isfinite(values))[0]
        if len(bad):
            found[:] = bad[0], len(bad)
        values[bad] = 0
        x[:] = values

    def measure(self, type, x, results, w, rows_per_matrix, partials, stream):
        rows, matrices = len(x) // w.shape[1], len(w)
        data = np.concatenate([result.reshape(rows, -1) for result in results], axis=1)
        x = x.reshape(matrices, rows_per_matrix, -1).astype(np.float64)
        e = x - decode(type, data, x.shape[2], as_weights=True).reshape(x.shape)
        w = w.reshape(matrices, 1, -1)
        partials[...] = 0
        partials[0] = (
            (e**2).sum(),
            (x**2).sum(),
            (w * e**2).sum(),
            (w * x**2).sum(),
            abs(e).max(),
            abs(x).max(),
        )

    def join(self, heads, bodies, out, stream):
        out[:, : heads.shape[1]], out[:, heads.shape[1] :] = heads, bodies.reshape(len(out), -1)
