"""SentencePiece models, trained on a few lines."""

from __future__ import annotations

import io

import sentencepiece

from .tiny_checkpoint import PROSE

TEXT = (
    f"{PROSE}\nDon't we'll I'VE HELLO Größe naïve façade \u65e5\u672c\u8a9e \u6f22\u5b57 "
    f"\u0438\u0437 \u0441\u043b\u043e\u0432 \uac00\ub098 \U0001f642\n    return x\n        y\n"
)


def trained_model(**options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return model.getvalue()
