"""Pushing to the Hub: access is checked before training, and a push that fails costs a warning, not the run."""

import logging
import shlex
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from transformers import TrainingArguments

from .checkpoints import CheckpointError

logger = logging.getLogger(__name__)

# What transformers leaves out when it uploads an output folder.
NOT_PUSHED = ("checkpoint-*", "_*")


def check_write_access(args: TrainingArguments, create: bool = True) -> None:
    """Refuse `push_to_hub` without access, before anything else is loaded; asks the network only where it is set.

    Args:
        create: make the repository, which proves the most. A dry run only asks who the token belongs to.

    Raises:
        ValueError: no network, no token, a token that only reads, or another's repository.
    """
    if not args.push_to_hub:
        return
    repo = args.hub_model_id or Path(args.output_dir).absolute().name
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            "push_to_hub = True, but HF_HUB_OFFLINE is set. Unset it, or set push_to_hub: false and upload later: "
            f"{upload_command(repo, args)}"
        )
    api = HfApi(token=args.hub_token)
    try:
        role = ((api.whoami().get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise ValueError(_refusal(repo, "the token can only read"))
        if create:
            repo = api.create_repo(repo, private=args.hub_private_repo, exist_ok=True).repo_id
            _check_write(api, repo)
    except ValueError as error:
        if isinstance(error, HfHubHTTPError):
            raise ValueError(_refusal(repo, str(error).strip().splitlines()[-1])) from error
        raise
    except Exception as error:  # no token at all, no network, a server error: each has its own class
        raise ValueError(_refusal(repo, " ".join(str(error).split()) or type(error).__name__)) from error


def _check_write(api: HfApi, repo: str) -> None:
    try:
        api.auth_check(repo, write=True)
    except RepositoryNotFoundError:  # a Hub that does not know this question: it did create the repository
        pass


def _refusal(repo: str, reason: str) -> str:
    return (
        f"push_to_hub = True, but {repo!r} cannot be written: {reason.rstrip('. ')}. Log in with a token that may "
        "write (`hf auth login`, HF_TOKEN or hub_token), choose another hub_model_id, or set push_to_hub: false."
    )


def upload_command(repo: str, args: TrainingArguments) -> str:
    """The shell command that uploads the output folder."""
    words = ["hf", "upload", repo, str(args.output_dir), "."]
    for pattern in NOT_PUSHED:
        words += ["--exclude", pattern]
    return shlex.join(words + (["--revision", args.hub_revision] if args.hub_revision else []))


class HubPushing:
    """Mixin of a trainer: pushes as transformers does, from whole checkpoints, and survives a push that fails."""

    def push_to_hub(self, *args, **kwargs):
        """Save locally, then upload the output folder without checkpoints; None if the upload failed."""
        try:
            return super().push_to_hub(*args, **kwargs)
        except CheckpointError:
            raise
        except Exception as error:  # whatever the network does, the model is saved and the run has succeeded
            self._warn_of_push(error)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._warn_of_failed_jobs()
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:
            self._warn_of_push(error)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._warn_of_failed_jobs()

    def _warn_of_failed_jobs(self) -> None:
        """transformers uploads checkpoints in the background and never looks at how that ended."""
        push = getattr(self, "push_in_progress", None)
        for job in list(push.jobs) if push is not None else []:
            if job.done():
                push.jobs.remove(job)
                if job.exception() is not None:
                    self._warn_of_push(job.exception())

    def _warn_of_push(self, error: BaseException) -> None:
        repo = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        logger.warning(
            "The push to %s failed (%s: %s). Everything is saved in %s; push again with:\n  %s",
            repo,
            type(error).__name__,
            " ".join(str(error).split())[:300],
            self.args.output_dir,
            upload_command(repo, self.args),
        )
