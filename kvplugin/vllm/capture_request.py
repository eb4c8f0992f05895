"""What a capture shall hold: one request, one of its steps, some layers, and how much of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvplugin.errors import ArgumentError

NEXT: Literal["next"] = "next"
ALL: Literal["all"] = "all"
CHOICES = {
    "request": "a request id, or n for the n-th running request, from 0",
    "step": f"'{NEXT}', or generated tokens that the step sees: 0 = the prompt's prefill, 1 = the first decode step",
    "layers": f"'{ALL}', or a list of layer numbers",
    "rows": "1 to 4096, the step's last query tokens",
    "limit": "bytes, 1 KiB to 4 GiB",
}
"""Valid values of each field, for messages."""


class CaptureRequest(BaseModel):
    """One capture, as it travels to the workers in JSON; the fields are those of :data:`CHOICES`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request: Annotated[str, Field(min_length=1, max_length=500)] | Annotated[int, Field(ge=0, strict=True)] = 0
    step: Literal["next"] | Annotated[int, Field(ge=0, strict=True)] = NEXT
    layers: Literal["all"] | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = ALL
    rows: int = Field(default=16, ge=1, le=4096)
    limit: int = Field(default=256 << 20, ge=1 << 10, le=4 << 30)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From JSON.

        Raises:
            ArgumentError: naming the first field that is wrong, and its valid values.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = str(first["loc"][0]) if first["loc"] else ""
            found = f"got {first['input']!r}"[:200] if field in CHOICES else f"{first['msg']}: {field or text!r}"[:200]
            allowed = CHOICES.get(field, f"a JSON object with any of {', '.join(CHOICES)}")
            raise ArgumentError(f"capture.{field}" if field in CHOICES else "capture", found, allowed) from None

    def names(self, request: str) -> bool:
        """True for the id that the client gave, with or without the suffix of 8 characters that vLLM appends to it."""
        return self.request in (request, request[:-9] if request[-9:-8] == "-" else request)
