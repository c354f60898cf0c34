"""Networks and what architectures build them from."""


def __getattr__(name: str):  # until all imports name the new place
    from . import network

    return getattr(network, name)
