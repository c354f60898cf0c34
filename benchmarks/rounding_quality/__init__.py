"""Parts of `better_bits.py`."""
