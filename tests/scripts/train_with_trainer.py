"""A tiny GPT-2 in the Trainer of transformers with its defaults: ``torchrun train_with_trainer.py [--losses FILE]``."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH = 64, 12


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sentences that mean nothing."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        tokens = torch.randint(WORDS, (LENGTH,), generator=random)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=LENGTH, vocab_size=WORDS, bos_token_id=0, eos_token_id=0
    )
    with tempfile.TemporaryDirectory() as folder:
        model: torch.nn.Module = GPT2LMHeadModel(config)
        trainer = Trainer(
            model,
            TrainingArguments(
                folder, max_steps=9, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
                logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
            ),
            train_dataset=Texts(),
        )  # fmt: skip
        trainer.train()
    if arguments.losses and trainer.is_world_process_zero():
        checksum = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        arguments.losses.write_text(json.dumps({"losses": losses, "norms": norms, "checksum": checksum}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
