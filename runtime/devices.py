from .weights.devices import *  # noqa: F403  until all imports name the new place
