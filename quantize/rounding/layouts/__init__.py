"""Where types store codes, words and scales, found by the decoders."""
