"""Whether a saved state fits KFAC's layers and parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tnt_optim.failures import COUNTERS
from tnt_optim.layer_inverses import Inverse
from tnt_optim.layers import Layer, matrix_shape
from tnt_optim.settings import check_settings

_LAYER_KEYS = {"stats", "factors", "first_step", *COUNTERS}
# Settings of the other optimizers, which check_settings looks at, too.
_NOT_HERE = {"max_factor_dim": 1, "relative_damping": False, "graft": None, "modes": None}


def check_kfac_settings(group: Mapping[str, Any]) -> None:
    """Checks the settings that KFAC has.

    Raises:
        ValueError: names the setting, the rule, and what came.
    """
    check_settings({**_NOT_HERE, **group})


def check_kfac_state_dict(
    group: Mapping[str, Any],
    layers: Sequence[Layer],
    inverse: Inverse,
    state_dict: Mapping[str, Any],
) -> None:
    """Checks that ``state_dict`` is of a KFAC with these layers and parameters.

    Raises:
        ValueError: says where the two part.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"state_dict must have the key {key!r}, got {sorted(state_dict)}")
    if len(state_dict["param_groups"]) != 1:
        raise ValueError(
            f"state_dict must have 1 parameter group, got {len(state_dict['param_groups'])}"
        )
    (saved,) = state_dict["param_groups"]
    missing = sorted(set(group) - set(saved) - {"param_names"})
    if missing:
        raise ValueError(f"state_dict lacks {missing}; is it another optimizer's?")
    try:
        check_kfac_settings(saved)
    except ValueError as error:
        raise ValueError(f"state_dict: {error}") from None
    if len(saved["params"]) != len(group["params"]):
        raise ValueError(
            f"state_dict must have {len(group['params'])} parameters, "
            f"got {len(saved['params'])}; is it of another model?"
        )
    by_weight = {layer.weight: layer for layer in layers}
    for index, param in zip(saved["params"], group["params"], strict=True):
        state = state_dict["state"].get(index)
        if state:
            name = f"state_dict['state'][{index}]"
            _check_shapes(name, "momentum", [state.get("momentum", param)], [tuple(param.shape)])
            if param in by_weight:
                _check_layer(name, state, by_weight[param], inverse)
            elif set(state) != {"momentum"}:
                raise ValueError(f"{name} must hold a momentum only, got {sorted(state)}")


def _check_layer(name: str, state: Mapping[str, Any], layer: Layer, inverse: Inverse) -> None:
    missing = sorted(_LAYER_KEYS - set(state))
    if missing:
        raise ValueError(f"{name} lacks {missing}; is it another optimizer's?")
    rows, columns = matrix_shape(layer)
    _check_shapes(name, "stats", state["stats"], [(rows, rows), (columns, columns)])
    _check_shapes(name, "factors", state["factors"], inverse.shapes(rows, columns))


def _check_shapes(
    name: str, key: str, tensors: Sequence[Any], wanted: Sequence[tuple[int, ...]]
) -> None:
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ValueError(f"{name}: {key} must be made of tensors")
    got = [tuple(tensor.shape) for tensor in tensors]
    if got != list(wanted):
        raise ValueError(
            f"{name}: {key} must have shapes {list(wanted)}, got {got}; is it of another model, or "
            "with another inverse?"
        )
