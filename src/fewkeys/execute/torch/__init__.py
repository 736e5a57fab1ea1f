"""Plans by operations of torch alone, in time and memory linear in the length; on every device, in every dtype."""

from fewkeys.execute.torch.by_block import attend, unsupported

__all__ = ["attend", "unsupported"]
