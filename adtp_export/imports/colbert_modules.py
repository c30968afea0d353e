"""The modules of a late-interaction directory: an encoder, dense layers on its states, which tokens count, and length 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError, quoted
from ..io import read_json
from ..model.heads.embedding import MODULES as ACTIVATIONS
from ..model.projections import NORMALIZE
from .limits import document
from .sentence_transformers import MODULES

MASK = "MultiVectorMask"
_KNOWN = ("Transformer", "Dense", "Normalize", MASK, "Dropout")
_PACKAGES = ("sentence_transformers", "pylate")
_ACTIVATIONS = {kind.__name__: name for name, kind in ACTIVATIONS.items()}
_USUAL_ACTIVATION = {
    "sentence_transformers": "torch.nn.modules.activation.Tanh",
    "pylate": "torch.nn.modules.linear.Identity",
}
"""Of a Dense whose file names none."""
_STATES = "token_embeddings"


class Module(NamedTuple):
    """kind: name of its class. folder: where its files are. package: of its class."""

    kind: str
    folder: Path
    package: str


def modules_of(directory: Path, check: bool = True) -> list[Module]:
    """Return the modules that a directory lists; `Transformer` is the first.

    Args:
        check: raise for what is not known.

    Raises:
        InputError: a module that is not known, one that lies elsewhere, or another order.
    """
    path = directory / MODULES
    listed = read_json(path)
    found = []
    for module in listed if isinstance(listed, list) else []:
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        package, _, name = str(kind).rpartition(".")
        package = package.partition(".")[0]
        if check and (name not in _KNOWN or package not in _PACKAGES):
            raise InputError(
                f"{path}: got the module {quoted(kind)}; accepted in a model of late interaction are {', '.join(_KNOWN)} of "
                f"{' and '.join(_PACKAGES)}"
            )
        if check and (not isinstance(folder, str) or Path(folder).name != folder or folder == ".."):
            raise InputError(f"{path}: {name} lies in {quoted(folder)}; accepted are folders of the same directory")
        found.append(Module(name, directory / str(folder), package))
    kinds = [module.kind for module in found]
    if check and (kinds[:1] != ["Transformer"] or kinds.count("Transformer") > 1 or kinds.count(MASK) > 1):
        raise InputError(
            f"{path}: got {', '.join(kinds) or 'no module'}; accepted are Transformer, any number of Dense and Normalize, and one {MASK}"
        )
    return found


def projection_of(module: Module) -> list[Any] | str | None:
    """Return a module as `vectors.projections` has it; None for one that changes no vector.

    Raises:
        InputError: a module that works on something else, or an activation that is not known.
    """
    path = module.folder / "config.json"
    fields = document(path)
    for name in ("module_input_name", "module_output_name"):
        given = fields.get(name)
        older = module.package == "pylate" or (module.kind == "Dense" and given == "sentence_embedding")
        if module.kind in ("Dense", "Normalize") and not (given in (None, _STATES) or older):
            raise InputError(f"{path}: {name} is {quoted(given)}; accepted are modules that work on {_STATES!r}")
    if module.kind == "Normalize":
        return NORMALIZE
    if module.kind != "Dense":
        return None
    named = str(fields.get("activation_function", _USUAL_ACTIVATION[module.package]))
    package, _, name = named.rpartition(".")
    if name not in _ACTIVATIONS or package.partition(".")[0] != "torch":
        raise InputError(
            f"{path}: activation_function is {quoted(named)}; accepted are torch's {', '.join(_ACTIVATIONS)}"
        )
    sizes = [fields.get(size) for size in ("in_features", "out_features")]
    return [*sizes, fields.get("bias", True), _ACTIVATIONS[name], fields.get("use_residual", False)]
