"""Stop strings, looked for on the host while a GPU draws on."""

from funcrl.generators.embedded.drawn import Request
from funcrl.generators.stops import has_stop_string


class Texts:
    """The tokens of samples as the host knows them, and where a stop string ends one."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}  # the length of each sample that a stop string ends

    def read(self, sample: int, count: int, last: list[int]) -> bool:
        """Add a sample's new tokens; return whether a stop string has ended it.

        Args:
            sample: its number.
            count: of its tokens so far.
            last: the last ones of these, among them all that are new.
        """
        tokens = self._tokens.setdefault(sample, [])
        new = last[len(last) - (count - len(tokens)) :]
        for token in new:
            if sample in self.ends:
                break
            tokens.append(token)
            if has_stop_string(tokens, self._request.sampling, self._request.decode):
                self.ends[sample] = len(tokens)
        return sample in self.ends
