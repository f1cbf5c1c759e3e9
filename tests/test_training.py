"""Training with PyTorch: the example's attention gives the loss curve of PyTorch's own."""
import pytest

from tests.commands import command

pytestmark = pytest.mark.examples
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
BATCH, LENGTH, SYMBOLS, HEADS, DIM, STEPS = 8, 24, 8, 2, 32, 40


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    """Causal attention of q, k, v [B, N, H, D], computed by an artefact for the CPU."""
    from scripts.examples.pytorch import load_attention
    path = tmp_path_factory.mktemp("training") / "attention.so"
    workload = f"fwd_d{DIM}_dv{DIM}_f32_causal"
    command("export", "--target", "cpu", "--plan", "default", "--workload", workload, "--backward", "--output", path, code=0)
    return load_attention(path, "training")


def by_pytorch(q, k, v):
    """The same by PyTorch."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Transformer(torch.nn.Module):
    """Two layers of attention and a feed-forward part, on symbols with places."""

    def __init__(self, attend):
        super().__init__()
        width = HEADS * DIM
        self.attend = attend
        self.symbols, self.places = torch.nn.Embedding(SYMBOLS, width), torch.nn.Embedding(LENGTH, width)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(2))
        self.rest = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width), torch.nn.GELU(),
                                torch.nn.Linear(2 * width, width)) for _ in range(2))
        self.guess = torch.nn.Linear(width, SYMBOLS)

    def forward(self, text):
        x = self.symbols(text) + self.places(torch.arange(text.shape[1]))
        for qkv, rest in zip(self.qkv, self.rest):
            x = x + self.attend(*qkv(x).view(*text.shape, 3, HEADS, DIM).unbind(2)).flatten(2)
            x = x + rest(x)
        return self.guess(x)


def losses(attend, dtype=torch.float32):
    """The loss after each step of learning to copy: the second half of a text is its first half again."""
    torch.manual_seed(0)
    model, random = Transformer(attend).to(dtype), torch.Generator().manual_seed(1)
    optimizer, found = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(STEPS):
        half = torch.randint(SYMBOLS, (BATCH, LENGTH // 2), generator=random)
        text = torch.cat((half, half), dim=1)
        guessed = model(text[:, :-1])[:, LENGTH // 2 - 1:]
        loss = torch.nn.functional.cross_entropy(guessed.flatten(0, 1), half.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_transformer_learns_as_with_pytorch(attention):
    ours, theirs, exact = losses(attention), losses(by_pytorch), losses(by_pytorch, torch.float64)
    assert ours[-1] < 0.8 * ours[0]
    worst = max(abs(a - b) for a, b in zip(ours, exact))
    assert worst <= 4 * max(abs(a - b) for a, b in zip(theirs, exact)) + 1e-6


def test_gradients_are_those_of_autograd(attention):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, h, DIM, generator=generator) for n, h in ((50, 4), (50, 4), (50, 4))]
    dout = torch.randn(2, 50, 4, DIM, generator=generator)

    def gradients(attend, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        return torch.autograd.grad(attend(*leaves), leaves, dout.to(dtype))
    exact = gradients(by_pytorch, torch.float64)
    for ours, theirs, wanted in zip(gradients(attention, torch.float32), gradients(by_pytorch, torch.float32), exact):
        assert (ours - wanted).abs().max() <= 2 * (theirs - wanted).abs().max() + 1e-7
