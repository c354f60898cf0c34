from ..weights.split_plan import *  # noqa: F403  until all imports name the new place
