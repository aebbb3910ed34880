"""A callback that says, once and in one sentence, why a run is not learning and what to try."""

import logging
import math

from transformers import TrainerCallback

from .configs import JanusGRPOConfig
from .run_log import MESSAGE, read_messages, training_rows
from .signal_rules import CONSEQUENCES, DEAD, RULES, SignalSettings

logger = logging.getLogger(__name__)


class SignalMonitorCallback(TrainerCallback):
    """Reads the log of training after every row and warns once per cause.

    What was said is kept in `state.log_history` (`{"step": 12, "monitor/no_signal": "..."}`): it is saved with the
    checkpoint, so that a resumed run does not repeat it, and `curve.png` shows it. All values that the rules read are
    equal on all ranks, and so is the decision to stop.

    Args:
        settings: what the rules know beside the log, see `monitor_settings`.
        stop_on_no_signal: end the training (as at `max_steps`) when no weight will ever move.
    """

    def __init__(self, settings: SignalSettings, stop_on_no_signal: bool = False) -> None:
        self.settings, self.stop_on_no_signal = settings, stop_on_no_signal
        self._told: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Recalls what was said before the checkpoint that the run goes on from."""
        self._told = {cause for _, cause, _ in read_messages(state.log_history)}

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Judges the run so far; rows of evaluation do not count."""
        if "reward" not in (logs or {}):
            return
        rows = training_rows(state.log_history)
        for cause, rule in RULES.items():
            explained = {effect for earlier in self._told for effect in CONSEQUENCES.get(earlier, ())}
            if cause not in self._told | explained and (sentence := rule(rows, self.settings)):
                self._say(cause, sentence, state, control)

    def _say(self, cause: str, sentence: str, state, control) -> None:
        self._told.add(cause)
        state.log_history.append({"step": state.global_step, MESSAGE + cause: sentence})
        stop = self.stop_on_no_signal and cause in DEAD
        if stop:
            control.should_training_stop = True
        if state.is_world_process_zero:
            ending = " Training stops (stop_on_no_signal)." if stop else ""
            logger.warning("Step %d: %s%s", state.global_step, sentence, ending)


def monitor_settings(args: JanusGRPOConfig, vocab_size: int, codebook_size: int) -> SignalSettings:
    """The settings of a run with these arguments and sizes of the two vocabularies."""
    guidance = 1.0 if args.task == "i2t" else args.guidance_scale
    return SignalSettings(
        window=args.monitor_window,
        patience=args.no_signal_patience,
        scale_rewards=args.scale_rewards,
        mask_truncated_completions=args.mask_truncated_completions,
        guidance_scale=guidance if args.logp_guidance == "guided" or guidance == 1 else None,
        max_entropy={"text": math.log(vocab_size), "image": math.log(codebook_size)},
    )
