"""Bytes that a layer's experts keep of one microbatch, beyond what its attention and norms do, by the rows that they compute.

Tensors that autograd keeps, and places of rows, which the runtime keeps besides (``instrument/expert``). Of n tokens with k
routes each of h numbers of e bytes, weights and logits of w bytes, E experts, R rows of width f on this rank (with padding):

    router       logits n·E·w and weights n·k·w, chosen experts 8·n·k; of 16 bits its input again, n·h·w, and weights n·k·e
    rows         R·(h + 2·f)·e: what the experts get, and their inner layer before and after its activation
    all-to-all   n·k·h·e that came back, places 16·n·k, and 16·R where rows of several ranks are sorted by expert
    padded       the same, with places of E·C + 1 slots and n·k routes
    all-gather   R·h·e twice, R weights, 8·R places and 8 bytes for each route of all ranks
    shared MLP   n'·2·f'·e; of its coefficients what they weigh

Where a forward runs in pieces (``instrument/expert/pieces.py``), what begins a piece is kept as well: the rows that came, those
that came back, and what crosses a cut and is kept by nothing else (a shared MLP's output, weights that are read with 16 bits).

From I to W a rank keeps R·2·(h + f)·e of its experts, n·E·w of the router's gradient and what the router reads, and the inputs
and output gradients of the shared MLP.

Tests hold them against what is alive after the forward, and after I.
"""

from __future__ import annotations

from dataclasses import dataclass

from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.experts import INDEX_BYTES
from pptrace.sizes.form import Family


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Sizes of a layer's experts on one rank.

    ``num_tokens`` are those that the rank routes, ``held`` those of its shared MLP and ``between`` those of its output.
    ``width`` and ``shared_width`` are this rank's, ``sharing`` counts the ranks of ep and etp together.
    """

    options: ExpertOptions
    num_experts: int
    sharing: int
    held_experts: int
    hidden: int
    width: int
    shared_width: int
    sequences: int
    num_tokens: int
    held: int
    between: int
    item_bytes: int
    weight_bytes: int
    family: Family = Family.GPT

    def kept(self, rows: float) -> float:
        """Bytes with so many rows of this rank's experts."""
        num_bytes = (
            self._router() + rows * (self.hidden + len(self.family.inner_tensors) * self.width) * self.item_bytes
        )
        return num_bytes + self._travelled(rows) + self._places(rows) + self._shared() + self._losses()

    def kept_at_cuts(self, arrived: float, back: float) -> float:
        """Bytes that a forward in pieces keeps besides, with so many rows that came along ep and that came back.

        Experts read the rows that came as they are where these are all of one expert, which no other rank shares.
        """
        is_shared = self.sharing * self.held_experts > self.num_experts
        is_copied = self.held_experts > 1 or is_shared
        num_bytes = (arrived * is_copied + back) * self.hidden * self.item_bytes
        if self.options.shared_width and not self.options.shared.num_coefficients:
            num_bytes += self.between * self.hidden * self.item_bytes
        if self._is_narrow and not (self.options.scoring == "softmax-after" and self.options.scale == 1):
            num_bytes += self._routes * self.weight_bytes
        return num_bytes

    def kept_for_recompute(self, rows: float) -> float:
        """Bytes of the decisions that a recomputation follows."""
        counts = (self.num_experts + 1) * INDEX_BYTES
        counts += self.sequences * self.num_experts * INDEX_BYTES if self.options.aux_loss else 0
        return self._routes * INDEX_BYTES + self._places(rows, again=True) + counts

    def weight_work(self, rows: float) -> float:
        """Bytes that W reads, which I leaves, with so many rows: inputs and output gradients of experts, router, shared MLP."""
        options, e = self.options, self.item_bytes
        num_bytes = rows * (2 * self.hidden + self.family.num_matrices * self.width) * e
        num_bytes += self.num_tokens * self.num_experts * self.weight_bytes
        num_bytes += self._router_input()
        keeps_norm, is_gathered = self._reads_norm, self.held != self.between
        if options.shared_width:
            whole, outputs = self.held * self.hidden * e, options.shared.num_coefficients
            num_bytes += 2 * self.held * self.shared_width * e + whole + self.between * outputs * e
            num_bytes += (whole + self._norm_bytes) * is_gathered  # the whole input; the shard of the output's gradient
            keeps_norm |= not is_gathered or outputs > 0
        return num_bytes + self._norm_bytes * keeps_norm

    @property
    def _routes(self) -> int:
        return self.num_tokens * self.options.top_k

    @property
    def _is_narrow(self) -> bool:
        return self.item_bytes < self.weight_bytes

    def _router(self) -> int:
        """Bytes of what leads to the choice and the weights."""
        options, w = self.options, self.weight_bytes
        num_bytes = self._routes * INDEX_BYTES + self.num_tokens * self.num_experts * w + self._weights()
        if not options.shared_width and not self._reads_norm:  # nothing reads the norm's output itself
            num_bytes -= self._norm_bytes
        return num_bytes + self._router_input()

    @property
    def _norm_bytes(self) -> int:
        return self.between * self.hidden * self.item_bytes

    @property
    def _reads_norm(self) -> bool:
        """Return whether the router reads the output of the norm itself."""
        # Of several sequences ranks of tp share out the tokens, so that what a rank routes is a copy.
        is_copied = self.num_tokens != self.between and self.sequences > 1
        return not self._is_narrow and not is_copied

    def _router_input(self) -> int:
        """Bytes of what the router reads, where that is not the norm's output: widened, or a copy."""
        if self._reads_norm:
            return 0
        return self.num_tokens * self.hidden * (self.weight_bytes if self._is_narrow else self.item_bytes)

    def _weights(self) -> int:
        """Bytes of the weights on their way from scores to what the product with the experts' output reads."""
        options, of_routes = self.options, self._routes * self.weight_bytes
        is_softmax = options.scoring == "softmax-after"  # whose backward reads its result
        is_divided = options.scoring == "renormalised" or (options.scoring == "sigmoid" and options.top_k > 1)
        num_bytes = of_routes * is_softmax + (of_routes + self.num_tokens * self.weight_bytes) * is_divided
        if options.dispatcher == "all-gather" or (is_softmax and options.scale == 1 and not self._is_narrow):
            return num_bytes
        return num_bytes + self._routes * self.item_bytes

    def _travelled(self, rows: float) -> float:
        """Bytes of the rows that came back, or of what the experts made of them, and the same weighted."""
        if self.options.dispatcher == "all-gather":
            return rows * (2 * self.hidden * self.item_bytes + self.item_bytes)
        return self._routes * self.hidden * self.item_bytes

    def _places(self, rows: float, *, again: bool = False) -> float:
        match self.options.dispatcher:
            case "all-gather":
                return (self._routes * self.sharing + (0 if again else rows)) * INDEX_BYTES
            case "padded":
                return (rows / self.sharing * (self.num_experts / self.held_experts) + 1 + self._routes) * INDEX_BYTES
        is_sorted = self.sharing > 1 and self.held_experts > 1
        return 2 * (self._routes + (rows if is_sorted else 0)) * INDEX_BYTES

    def _shared(self) -> int:
        options, e = self.options, self.item_bytes
        if not options.shared_width:
            return 0
        outputs = options.shared.num_coefficients
        weighed = self.between * self.hidden * e * outputs  # its output; of two coefficients the experts' too
        return 2 * self.held * self.shared_width * e + self.between * outputs * e + weighed

    def _losses(self) -> int:
        w, num_bytes = self.weight_bytes, 0
        if self.options.aux_loss:
            num_bytes += (self.num_tokens + self.sequences) * self.num_experts * w
            num_bytes += self.num_tokens * w * (self.options.scoring == "sigmoid")  # the sum that they are divided by
        if self.options.z_loss:
            num_bytes += self.num_tokens * w
            num_bytes += self.num_tokens * self.num_experts * w * (self.options.scoring != "softmax-after")
        return num_bytes
