"""The definition of every operator, in plain torch, for any float dtype and any device.

Each function has the arguments and result of the public function of its name, which documents the
contract; in tracebacks it is the ``definition`` of the operator's file.
Nothing here is tuned or validated. The fast implementations are tested against these definitions,
which also run on devices without a fast implementation.

No argument changes if memory runs out or anything else raises. All results of a call exist beside
the old values.
"""

from tnt_kernels import operators

__all__ = list(operators.OPERATORS)

gram_ema_ = operators.gram_ema.definition
damped_inverse = operators.damped_inverse.definition
inverse_root = operators.inverse_root.definition
mode_products = operators.mode_products.definition
preconditioned_step_ = operators.preconditioned_step.definition
scaled_step_ = operators.scaled_step.definition
grafted_directions_ = operators.grafted_directions.definition
