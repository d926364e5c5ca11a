"""KFAC and torch.compile: compiled layers are refused, other compiled parts are not."""

import pytest
import torch
from drawn import close
from kfac_models import conv_net, images, observed_statistics
from torch import nn

from tnt_optim import KFAC
from tnt_optim.autograd import graph_nodes


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = KFAC(model)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match="parameters of '0'.* Observe .* without torch.compile"):
        opt.observe(compiled(torch.randn(5, 3)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_compiled_parts_without_layers_change_nothing() -> None:
    x, labels = images(), torch.randint(5, (8,))
    model = conv_net()
    expected = observed_statistics(model, lambda: model(x), labels)
    model[3] = torch.compile(model[3], backend="aot_eager")
    nodes = graph_nodes(model(x))
    assert any(node.name() == "CompiledFunctionBackward" for node in nodes)
    for a, b in zip(expected, observed_statistics(model, lambda: model(x), labels), strict=True):
        close(b, a)
