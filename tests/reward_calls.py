"""What TRL calls a reward with, for two completions."""

CALL = dict(prompts=["p", "q"], completions=["a", "bbb"], completion_ids=[[1], [2]], trainer_state=None, log_extra=None)
