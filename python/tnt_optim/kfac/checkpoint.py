"""Whether a saved state fits KFAC's layers and parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tnt_optim.checkpoint import check_groups
from tnt_optim.kfac.inverses import Inverse
from tnt_optim.kfac.layers import Layer, matrix_shape
from tnt_optim.options import check_settings
from tnt_optim.state import COUNTERS, check_keys

_LAYER_KEYS = {"stats", "factors", "first_step", *COUNTERS}


def check_kfac_state_dict(
    group: Mapping[str, Any],
    layers: Sequence[Layer],
    inverse: Inverse,
    settings: set[str],
    state_dict: Mapping[str, Any],
) -> None:
    """Checks that ``state_dict`` is of a KFAC with these layers, parameters and ``settings``.

    Raises:
        ValueError: says where the two part.
    """
    check_groups([group], state_dict, settings, check_settings)
    by_weight = {layer.weight: layer for layer in layers}
    saved = state_dict["param_groups"][0]["params"]
    for index, param in zip(saved, group["params"], strict=True):
        state = state_dict["state"].get(index)
        if state:
            name = f"state_dict['state'][{index}]"
            _check_shapes(name, "momentum", [state.get("momentum", param)], [tuple(param.shape)])
            if param in by_weight:
                _check_layer(name, state, by_weight[param], inverse)
            elif set(state) != {"momentum"}:
                raise ValueError(f"{name} must hold a momentum only, got {sorted(state)}")


def _check_layer(name: str, state: Mapping[str, Any], layer: Layer, inverse: Inverse) -> None:
    check_keys(name, state, _LAYER_KEYS)
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
