# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Trainer teaches a tiny GPT-2, which starts from nothing, to count. Nothing here
knows of checkpoints, and Trainer writes none."""

import argparse
import hashlib

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH, SAMPLES = 64, 32, 512


class Counting(Dataset):
    """Sample n counts from n on, in steps of 1 to 4."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) * (1 + number % 4) + number) % WORDS
        return {"input_ids": words, "labels": words}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="trained")
    options = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()

    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {entry['loss']!r}", flush=True)
    digest = hashlib.sha256()
    for weights in model.parameters():
        digest.update(weights.detach().numpy().tobytes())
    print(f"weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
