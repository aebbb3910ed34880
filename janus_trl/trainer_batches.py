"""Which rows a GRPO step gets, and how they are read."""

from datasets import Dataset as HFDataset
from torch.utils.data import Dataset

from .task_mixture import TaskSampler


class RepeatedRows(Dataset):
    """Reads each different row of a batch once, and a batch that comes again not at all.

    TRL's sampler asks for a prompt once per completion of its group, and for the whole generation batch again at each
    of its micro-steps, which all but the first ignore. With pictures, whose decoding is what reading costs, groups of
    8 and 8 micro-steps decoded each picture 64 times a step.

    Args:
        rows: a data set of maps.
    """

    def __init__(self, rows: HFDataset):
        self.rows = rows
        self._last: tuple[list[int], dict[int, dict]] = [], {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        """Rows of a batch; each is a dict of its own, pictures are shared."""
        if indices != self._last[0]:
            different = list(dict.fromkeys(indices))
            self._last = list(indices), dict(zip(different, self.rows.__getitems__(different), strict=True))
        return [_copied(self._last[1][i]) for i in indices]


def _copied(value):
    """Lists and dicts anew, all else shared."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


class RolloutBatches:
    """Mixin of `JanusGRPOTrainer`: order and reading of the rows."""

    def _get_dataloader(self, dataset, *args, **kwargs):
        rows = RepeatedRows(dataset) if isinstance(dataset, HFDataset) else dataset
        return super()._get_dataloader(rows, *args, **kwargs)

    def _run_epoch(self, model, epoch, *args, **kwargs):
        """Shuffle by seed and epoch, so that a resumed run sees the prompts of a straight one.

        TRL's sampler draws every epoch's order from one generator: on resume it would be that of the first epoch. A
        `set_epoch` of the sampler is not enough, since with several processes the resumed loader does not reach it.
        """
        if self.shuffle_dataset and self._train_sampler is not None:
            self._train_sampler.generator.manual_seed(self.args.seed + epoch)
        if isinstance(self._train_sampler, TaskSampler):
            self._train_sampler.epoch = epoch
        return super()._run_epoch(model, epoch, *args, **kwargs)

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        if self.task == "both":
            self._train_sampler = TaskSampler.like(self._train_sampler, self._pools, self.args.task_proportions)
        return self._train_sampler
