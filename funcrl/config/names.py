"""What an option may name: a part that funcrl has, or one of a user's own."""

from typing import Annotated, TypeAlias

from funcrl.core.arguments import Kind

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce")
OPTIMIZERS = ("adamw", "sgd", "muon")
GENERATORS = ("sampler", "vllm")


def is_own(name: str) -> bool:
    """Return whether a name is one of a user's code, file.py:Name or module:Name."""
    place, _, attribute = name.rpartition(":")
    names = attribute.split(".")
    return bool(place) and all(each.isidentifier() for each in names) and place != "pypi"


def _one_of(names: tuple[str, ...]) -> Kind:
    return Kind(
        f"one of {', '.join(names)}, or your own as file.py:name",
        lambda value: isinstance(value, str) and (value in names or is_own(value)),
        is_of_type=lambda value: isinstance(value, str),
    )


AlgorithmName: TypeAlias = Annotated[str, _one_of(ALGORITHMS)]
OptimizerName: TypeAlias = Annotated[str, _one_of(OPTIMIZERS)]
GeneratorName: TypeAlias = Annotated[str, _one_of(GENERATORS)]
