from .weights.switches import *  # noqa: F403  until all imports name the new place
