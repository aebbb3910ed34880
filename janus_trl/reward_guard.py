"""A reward that raises on one rank ends the run on all ranks, with the reward's name and the rank."""

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.utils import gather_object
from trl.trainer.utils import get_callable_name, is_async_callable


class GuardedReward:
    """Calls `function`; an exception is kept until all ranks can hear of it, and the rows count as unscored.

    Raised at once it would leave the other ranks in TRL's gather of the rewards, until a time-out with another message.
    """

    def __init__(self, function: Callable):
        self.function, self.error = function, None
        self.__name__ = get_callable_name(function)

    def __call__(self, completions, **arguments):
        try:
            return self.function(completions=completions, **arguments)
        except Exception as error:  # raised again by `raise_on_all_ranks`
            self.error = error
            return [None] * len(completions)


def guard(functions: list[Callable]) -> list[Callable]:
    """Guard every function; `async` ones are awaited by TRL itself and stay as they are."""
    return [function if is_async_callable(function) else GuardedReward(function) for function in functions]


def raise_on_all_ranks(functions: list[Callable], accelerator: Accelerator) -> None:
    """Collective: raise what a guarded reward raised on any rank.

    Raises:
        RuntimeError: naming reward, rank and error; caused by the original exception where it happened.
    """
    guarded = [f for f in functions if isinstance(f, GuardedReward)]
    failed = [f for f in guarded if f.error is not None]
    notes = [
        f"reward '{f.__name__}' failed on rank {accelerator.process_index}: {type(f.error).__name__}: {f.error}"
        for f in failed
    ]
    notes = gather_object(notes)
    if not notes:
        return
    cause = failed[0].error if failed else None
    for function in failed:
        function.error = None
    raise RuntimeError("; ".join(notes)) from cause
