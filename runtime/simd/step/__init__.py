"""Operations of a decoding step besides products: what layers do with the row of one token.

All vectors are float32 and have multiples of 16 elements. Operations that every thread does for
itself write to memory of that thread, so that no thread has to wait for another one.
"""
