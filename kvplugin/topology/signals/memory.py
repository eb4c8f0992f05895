"""What sampled decode rows learned, kept until the next step and the next leader layer can be compared with it."""

from __future__ import annotations

import torch

from kvplugin.errors import ArgumentError


class SignalMemory:
    """The last sampled set of each request and leader layer, at fixed addresses.

    A request has slot ``request & (slots - 1)`` and shares it with others: a tag says whose set is there.

    Attributes:
        tokens: int32 ``[leaders, slots, width]``, learned tokens in no promised order, then -1.
        tags: int32 ``[leaders, slots, 2]``, the request's key and the row's length; length 0 = empty.
    """

    def __init__(self, leaders: int, slots: int, width: int, device: torch.device | str) -> None:
        """Allocate it, empty.

        Raises:
            ArgumentError: a size below 1, or a number of slots that is no power of two.
        """
        for name, size in (("leaders", leaders), ("slots", slots), ("width", width)):
            if size < 1 or (name == "slots" and size & (size - 1)):
                allowed = "use a power of two" if name == "slots" else "use 1 or more"
                raise ArgumentError(f"SignalMemory.{name}", f"got {size}", allowed)
        with torch.inference_mode(False):  # tensors made in it could not be changed outside of it
            self.tokens = torch.full((leaders, slots, width), -1, dtype=torch.int32, device=device)
            self.tags = torch.zeros(leaders, slots, 2, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Forget everything."""
        self.tags.zero_()
