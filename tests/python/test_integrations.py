# SPDX-License-Identifier: Apache-2.0
"""Lightning and Accelerate, with usbyte's optimizer and with its hook: DDP's numbers."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import _scripts
import usbyte.torch as ub
from _models import difference
from _ranks import run_ranks

EPOCHS = 2
ENV = {"USBYTE_LEARNING_STEPS": "3"}
DATA = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)))


def loader(rank, size):
    sampler = DistributedSampler(DATA, size, rank, shuffle=False)
    return DataLoader(DATA, batch_size=4, sampler=sampler)


def model():
    torch.manual_seed(0)
    return _scripts.mlp()


def plain_ddp(rank, size):
    net = model()
    opt = _scripts.sgd(net)
    wrapped = nn.parallel.DistributedDataParallel(net)
    for _ in range(EPOCHS):
        for (x,) in loader(rank, size):
            opt.zero_grad()
            wrapped(x).pow(2).mean().backward()
            opt.step()
    return net.state_dict()


def lightning_optimizer(rank, size):
    ub.init()
    warnings.simplefilter("ignore")
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, automatic):
            super().__init__()
            self.automatic_optimization = automatic
            self.net = model()

        def training_step(self, batch, _):
            loss = self.net(batch[0]).pow(2).mean()
            if not self.automatic_optimization:
                opt = self.optimizers()
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()
            return loss

        def configure_optimizers(self):
            return ub.DistributedOptimizer(
                _scripts.sgd(self), self.named_parameters(), policy="wfbp"
            )

    want = plain_ddp(rank, size)
    for automatic in (True, False):
        module = Module(automatic)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=EPOCHS, use_distributed_sampler=False,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader(rank, size))
        (wrapped,) = trainer.optimizers
        assert wrapped.decision.overlap == "forward"
        assert difference(module.net.state_dict(), want) == 0, automatic
        wrapped.close()


def lightning_hook(rank, size):
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, batch, _):
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self):
            return _scripts.sgd(self)

    states = []
    for codec in ("none", "fp16"):
        hook = ub.ddp_comm_hook(codec)
        # DDPStrategy(ddp_comm_hook=hook) does so on GPUs alone.
        register = lightning.pytorch.callbacks.LambdaCallback(
            on_train_start=lambda trainer, _, hook=hook: trainer.strategy.model.register_comm_hook(
                None, hook
            )
        )
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = lightning.Trainer(
            accelerator="cpu", devices=size, strategy=strategy, max_epochs=EPOCHS,
            callbacks=[register], use_distributed_sampler=False, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, loader(rank, size))
        states.append({k: v.clone() for k, v in module.net.state_dict().items()})
    want = plain_ddp(rank, size)
    assert difference(states[0], want) == 0
    assert 0 < difference(states[1], want) < 0.01


def accelerates(rank, size):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    states = []
    for codec in ("none", "fp16"):
        net = model()
        prepared, opt = accelerator.prepare(net, _scripts.sgd(net))
        prepared.register_comm_hook(None, ub.ddp_comm_hook(codec))
        for _ in range(EPOCHS):
            for (x,) in loader(rank, size):
                opt.zero_grad()
                accelerator.backward(prepared(x).pow(2).mean())
                opt.step()
        states.append({k: v.clone() for k, v in net.state_dict().items()})
    want = plain_ddp(rank, size)
    assert difference(states[0], want) == 0
    assert 0 < difference(states[1], want) < 0.01
    # The optimizer in place of DDP: the model is not prepared.
    ub.init()
    net = model()
    opt = accelerator.prepare_optimizer(
        ub.DistributedOptimizer(_scripts.sgd(net), net.named_parameters(), policy="wfbp")
    )
    for _ in range(EPOCHS):
        for (x,) in loader(rank, size):
            opt.zero_grad()
            accelerator.backward(net(x).pow(2).mean())
            opt.step()
    assert difference({k: v.clone() for k, v in net.state_dict().items()}, want) == 0
    assert opt.optimizer.decision.overlap == "forward"
    opt.optimizer.close()


def test_lightning_with_the_optimizer():
    run_ranks(2, lightning_optimizer, timeout=120, env=ENV)


def test_lightning_with_the_hook():
    run_ranks(2, lightning_hook, timeout=120)


def test_accelerate():
    run_ranks(2, accelerates, timeout=120, env=ENV)
