"""An Accelerate job: prepare(), accumulate(), clip_grad_norm_; as a script, or by notebook_launcher."""

import argparse

import torch
from accelerate import Accelerator, notebook_launcher
from data import GPT, Text

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--notebook", action="store_true")
parser.add_argument("--port", default="29511")


def training_loop(steps, accumulate):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Text(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(*batch)[1]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                done += 1
            optimizer.step()
            optimizer.zero_grad()
        if done == steps:
            break
    if accelerator.is_main_process:
        print(f"final loss {loss.item():.8f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    args = parser.parse_args()
    if args.notebook:
        notebook_launcher(training_loop, (args.steps, args.accumulate), num_processes=2, use_port=args.port)
    else:
        training_loop(args.steps, args.accumulate)
