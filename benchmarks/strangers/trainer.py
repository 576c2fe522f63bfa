"""A Hugging Face Trainer job on a GPT-2 made from a configuration, with its defaults or without unused parameters."""

import argparse
import os
import tempfile

import torch
from data import Text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--find-unused", default="default")
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.text = Text()

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        row = self.text[i][0]
        return {"input_ids": row, "labels": row}


torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=192, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0, bos_token_id=0, eos_token_id=0)  # fmt: skip
more = {} if args.find_unused == "default" else {"ddp_find_unused_parameters": args.find_unused == "yes"}
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=args.steps,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=args.steps,
            disable_tqdm=True,
            seed=0,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=1e-3,
            **more,
        ),
        train_dataset=Rows(),
    )
    found = trainer.train()
if int(os.environ.get("RANK", "0")) == 0:
    print(f"final loss {found.training_loss:.8f}", flush=True)
