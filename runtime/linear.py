from .weights.linear import *  # noqa: F403  until all imports name the new place
from .weights.matrix import *  # noqa: F403
from .weights.stacked_linear import *  # noqa: F403
from .weights.taps import *  # noqa: F403
