"""TNT with Hugging Face's Trainer: trains a small language model on counting sequences.

Needs ``pip install 'transformers[torch]'``; run ``python examples/hugging_face_trainer.py``.
"""

import tempfile

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from tnt_optim import TNT, Masked

WORDS, LENGTH = 13, 12


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count by one of three strides from a random start, padded to one length."""
    starts, strides = torch.randint(WORDS, (count, 1)), torch.randint(1, 4, (count, 1))
    tokens = (starts + strides * torch.arange(LENGTH)) % WORDS
    counts = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (count, 1))
    return [
        {"input_ids": row, "attention_mask": mask.long(), "labels": row.where(mask, -100)}
        for row, mask in zip(tokens, counts, strict=True)
    ]


def main(steps: int = 60) -> tuple[list[float], TNT]:
    """Trains for ``steps`` steps; returns their losses and the optimizer."""
    torch.manual_seed(0)
    words = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None}
    size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**words, **size))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            learning_rate=0.01,
            weight_decay=0.01,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        # The Trainer reads neither argument for an optimizer that it is given: pass them on.
        opt = TNT(
            model.named_parameters(),
            lr=arguments.learning_rate,
            weight_decay=arguments.weight_decay,
            likelihood="categorical",
        )
        opt.attach(  # a position counts if the next one has a label; the last one never counts
            model,
            output=lambda out, args, kwargs: Masked(
                out.logits, F.pad(kwargs["labels"][:, 1:] != -100, (0, 1))
            ),
        )
        # None keeps the Trainer's own learning-rate schedule.
        trainer = Trainer(
            model=model, args=arguments, train_dataset=sequences(2000), optimizers=(opt, None)
        )
        trainer.remove_callback(PrinterCallback)  # it would print every step
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], opt


if __name__ == "__main__":
    losses, opt = main()
    for step in range(0, len(losses), 10):
        print(f"step {step:3}  loss {losses[step]:.4f}")
    print(f"last      loss {losses[-1]:.4f}  {opt.failures()}")
