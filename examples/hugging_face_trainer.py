"""TNT with Hugging Face's Trainer: trains a small language model on counting sequences.

Needs ``pip install 'transformers[torch]'``; run ``python examples/hugging_face_trainer.py``.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from tnt_optim import TNT

WORDS, LENGTH = 13, 12


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count by one of three strides from a random start."""
    starts, strides = torch.randint(WORDS, (count, 1)), torch.randint(1, 4, (count, 1))
    tokens = (starts + strides * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(steps: int = 60) -> tuple[list[float], TNT]:
    """Trains for ``steps`` steps; returns their losses and the optimizer."""
    torch.manual_seed(0)
    words = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None}
    size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**words, **size))

    opt = TNT(model.named_parameters(), likelihood="categorical")
    # The model predicts the next word at every position but the last; TNT sees one row for each.
    opt.attach(model, output=lambda out: out.logits[:, :-1])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
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
