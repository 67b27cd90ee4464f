import math
import warnings

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor

from lightning_commopt.train.workloads.digits import Digits
from lightning_commopt.train.workloads.gpt import GPT, StdlibSources
from lightning_commopt.train.workloads.mlp import MLP, SIZES, Blobs
from lightning_commopt.train.workloads.vision import RandomImages, VisionModel
from support.collectives import takes_collectives
from support.known import known
from support.refusals import one_by_one, refusals
from support.warm_ranks import run_ranks


def fitted(model, data, devices=1, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on the speed of tiny runs
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(model, datamodule=data)
        return trainer.validate(model, datamodule=data, verbose=False)[0]


@pytest.mark.parametrize(("max_steps", "warmup_share"), [(1, 0.2), (5, 0.2), (10, 0.1)])
def test_gpt_trains_however_few_steps_there_are(max_steps, warmup_share):
    model = GPT(width=16, num_layers=1, num_heads=2, context=16, warmup_share=warmup_share)
    fitted(model, StdlibSources(context=16, batch_size=2), max_steps=max_steps, limit_val_batches=1)


def test_gpt_needs_an_end():
    model = GPT(width=16, num_layers=1, num_heads=2, context=16)
    with pytest.raises(ValueError, match=r"set trainer\.max_steps or trainer\.max_epochs"):
        fitted(model, StdlibSources(context=16, batch_size=2), max_time="00:00:10:00", max_epochs=-1)


def test_gpt_sees_no_later_byte():
    torch.manual_seed(0)
    model = GPT(width=16, num_layers=2, num_heads=2, context=8).eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_gpt_learns_a_text_that_repeats(tmp_path):
    for number in range(11):
        (tmp_path / f"{number:02}.py").write_bytes(b"abcdefgh" * 200)
    seed_everything(0, verbose=False)
    data = StdlibSources(context=16, batch_size=8, folder=str(tmp_path))
    metrics = fitted(GPT(width=32, num_layers=1, num_heads=2, context=16, learning_rate=1e-2), data, max_steps=80)
    assert metrics["val_loss"] < 0.5  # a model that only knows how frequent each byte is gets log(8) = 2.08


def test_gpt_of_another_vocabulary_and_context_has_as_many_parameters_as_its_configuration_says():
    with torch.device("meta"):
        model = GPT(width=768, num_layers=12, num_heads=12, context=1024, vocabulary=50304)
    assert sum(parameter.numel() for parameter in model.parameters()) == 123_738_624 + 768 * (1024 - 64)


def test_gpt_trains_the_rows_that_no_byte_uses_too():
    model = GPT(width=16, num_layers=1, num_heads=2, context=8, vocabulary=300)
    logits = model(torch.randint(256, (2, 8)))
    assert logits.shape == (2, 8, 300)
    model.loss(torch.randint(256, (2, 9))).backward()
    gradient = known(model.token.weight.grad)
    assert gradient[256:].abs().min() > 0


def fit_gpt_on_two_ranks(sharded, activation_checkpointing):
    """Returns the validation loss after training, and which share of its blocks this rank holds then."""
    seed_everything(0, verbose=False)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else DDPStrategy()
    model = GPT(width=16, num_layers=2, num_heads=2, context=16, activation_checkpointing=activation_checkpointing)
    data = StdlibSources(context=16, batch_size=2)
    loss = fitted(model, data, devices=2, strategy=strategy, max_steps=6, limit_val_batches=2)["val_loss"]
    local = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.blocks.parameters()]
    return loss, sum(p.numel() for p in local) / sum(p.numel() for p in model.blocks.parameters())


@takes_collectives
def test_gpt_shards_itself_under_fsdp_and_trains_as_with_ddp():
    (loss_of_ddp, whole), _ = run_ranks(fit_gpt_on_two_ranks, False, False)
    sharded = run_ranks(fit_gpt_on_two_ranks, True, True)
    assert whole == 1
    assert [share for _, share in sharded] == pytest.approx([0.5, 0.5])
    assert [loss for loss, _ in sharded] == pytest.approx([loss_of_ddp, loss_of_ddp], rel=1e-5)


def gradients_of_gpt(activation_checkpointing):
    torch.manual_seed(0)
    model = GPT(width=16, num_layers=3, num_heads=2, context=8, activation_checkpointing=activation_checkpointing)
    kept = []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(torch.randint(256, (4, 9)))
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], sum(kept)


def test_activation_checkpointing_keeps_less_and_changes_no_gradient():
    (plain, kept), (checkpointed, kept_of_checkpointed) = map(gradients_of_gpt, (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))
    assert kept_of_checkpointed < kept / 2


def test_sources_are_split_by_file_in_the_order_of_names(tmp_path):
    for number in range(12):
        (tmp_path / f"{number:02}.py").write_bytes(bytes([number]) * 100)
    data = StdlibSources(context=9, batch_size=1, folder=str(tmp_path))
    data.setup("fit")
    of_training = torch.cat([batch.flatten() for batch in data.train_dataloader()]).unique()
    of_validation = torch.cat([batch.flatten() for batch in data.val_dataloader()]).unique()
    assert of_validation.tolist() == [0, 10]
    assert of_training.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11]


def test_sources_of_this_interpreter_are_enough():
    data = StdlibSources(context=64, batch_size=8)
    data.setup("fit")
    assert next(iter(data.train_dataloader())).shape == (8, 65)
    first, again = (next(iter(data.val_dataloader())) for _ in range(2))
    assert torch.equal(first, again)
    assert len(data.train_dataloader()) > 1000


def test_a_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"too few Python sources; set data\.folder"):
        StdlibSources(folder=str(tmp_path)).setup("fit")


def test_digits_of_training_and_validation_are_all_of_them_once():
    pytest.importorskip("sklearn")
    data = Digits(batch_size=1)
    loaders = (data.train_dataloader(), data.val_dataloader())
    assert sum(len(labels) for loader in loaders for _, labels in loader) == 1797


def test_random_images_are_the_same_on_every_run():
    first, again = (RandomImages(num_validation_images=2, image_size=4, batch_size=2) for _ in range(2))
    (images, labels), (images_again, labels_again) = (next(iter(data.val_dataloader())) for data in (first, again))
    assert torch.equal(images, images_again)
    assert torch.equal(labels, labels_again)


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [
        ("sklearn.datasets", Digits, "digits"),
        ("torchvision.models", lambda: VisionModel(name="vit_l_32"), "vision"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, make, extra):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'lightning-commopt\[{extra}\]'"):
        make()


@pytest.mark.parametrize(("size", "millions"), [("small", 1.5), ("medium", 8.4), ("large", 35.2), ("xlarge", 52.0)])
def test_mlp_has_the_parameters_of_its_size(size, millions):
    with torch.device("meta"):
        model = MLP(size=size)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    widths = [layer.out_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert widths == [*SIZES[size], 10]


def test_mlp_of_a_list_of_widths():
    model = MLP(size=[8, 4])
    assert model(torch.zeros(3, 784)).shape == (3, 10)
    assert model.hparams["size"] == [8, 4]


@pytest.mark.exhaustive
def test_blobs_are_learned_over_several_epochs():
    seed_everything(0, verbose=False)
    losses = []
    for epochs in (1, 4):
        data = Blobs(num_samples=4096, num_validation_samples=1024, batch_size=128)
        model = MLP(size=[256, 128], learning_rate=0.02)
        losses.append(fitted(model, data, max_epochs=epochs)["val_loss"])
    assert losses[0] > 1.5
    assert losses[1] < 0.7 * losses[0]


def test_blobs_are_the_same_on_every_run():
    (features, labels), (features_again, labels_again) = (first_of(Blobs(num_validation_samples=8)) for _ in range(2))
    assert features.shape == (8, 784)
    assert torch.equal(features, features_again)
    assert torch.equal(labels, labels_again)


def first_of(data):
    data.setup("fit")
    return next(iter(data.val_dataloader()))


def test_blobs_of_all_batches_are_all_samples_once():
    data = Blobs(num_samples=96, num_validation_samples=8, batch_size=32)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert [len(labels) for _, labels in batches] == [32] * 3
    features = torch.cat([features for features, _ in batches])
    everything = torch.stack([data.train_dataloader().dataset[index][0] for index in range(96)])
    assert torch.equal(features.sort(dim=0).values, everything.sort(dim=0).values)


REFUSED = [
    *one_by_one(Blobs, num_samples=[0], num_validation_samples=[0], separation=[-1]),
    *one_by_one(MLP, size=["huge", [], [8, 0], [8, 4.5], 8]),
    *((GPT, {"width": 10, "num_heads": 4}), (GPT, {"vocabulary": 255})),
]


def test_what_is_out_of_range_is_refused(golden):
    golden("refused_options", refusals(REFUSED))


def validated_on_two_ranks():
    """Returns what is logged in a validation on two ranks, and the same from all of its batches."""
    seed_everything(0, verbose=False)
    found = []
    for model, data in [
        (MLP(size=[8]), Blobs(num_samples=64, num_validation_samples=100, batch_size=7)),
        (GPT(width=16, num_layers=1, num_heads=2, context=16), StdlibSources(context=16, batch_size=2)),
    ]:
        logged = fitted(model, data, devices=2, strategy=DDPStrategy(), max_steps=2, limit_val_batches=3)
        found.append((logged, model.cpu(), data))
    (of_mlp, mlp, blobs), (of_gpt, _, _) = found
    with torch.no_grad():
        whole = [(mlp(inputs).argmax(1) == labels).float() for inputs, labels in blobs.val_dataloader()]
    return of_mlp["val_accuracy"], torch.cat(whole).mean().item(), of_gpt["val_perplexity"], of_gpt["val_loss"]


def test_accuracy_and_perplexity_are_of_all_ranks():
    """If it fails, a rank logs the accuracy of its own share, or perplexity is no exponential of the loss."""
    one, other = run_ranks(validated_on_two_ranks)
    assert one == other
    accuracy, expected, perplexity, loss = one
    assert accuracy == pytest.approx(expected)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-4)
