"""How long the gathering of a batch for which there is time lets the consumer's step go first.

A step begins with what one thread has to do before anything else can go on, such as launching kernels; and ranks that
wait for each other at the end of a step begin the next one at the same moment. If all of their gather threads began
then, too, the last rank would get its batch when most of the copying is done, and the others would wait for it.
docs/architecture.md has figures.
"""

from __future__ import annotations

# Of a step: little enough that a batch is gathered within the rest of it, if it could be within all of it, and much
# more than a step needs to begin.
_SHARE = 1 / 8
# So long is enough for ten ranks on each core.
_MOST_SECONDS = 0.02
# Less is not worth a timer.
_LEAST_SECONDS = 0.001


def head_start_seconds(step_seconds: float) -> float:
    """Returns how long after its submission a batch is begun, for a consumer whose last step took so long. Only for
    batches that are not late: those before them must be ready."""
    seconds = min(_SHARE * step_seconds, _MOST_SECONDS)
    return seconds if seconds >= _LEAST_SECONDS else 0.0
