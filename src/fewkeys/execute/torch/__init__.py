"""Plans by operations of torch alone, in linear time and memory; on every device, in every dtype."""

from fewkeys.execute.torch.by_block import attend, unsupported

__all__ = ["attend", "unsupported"]
