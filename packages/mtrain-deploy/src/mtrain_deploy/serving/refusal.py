"""Requests that are refused."""


class Refusal(Exception):
    """A request is refused with a status of HTTP and one sentence.

    Args:
        status: Status code, 4xx or 5xx.
        sentence: What was given, what was expected, what to do.
        retry_after_s: Whole seconds after which the client may try again.
        closes: Whether the connection ends, because the rest of the request is not read.
    """

    def __init__(self, status: int, sentence: str, *, retry_after_s: int | None = None, closes: bool = False) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)
        if closes:
            self.headers["Connection"] = "close"
