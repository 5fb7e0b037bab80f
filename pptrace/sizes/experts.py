"""Bytes that a layer with experts sends, from its sizes and the routes that its tokens took.

Every call of one forward and backward of one microbatch on one rank, by axis: as marks count them, the whole tensor, with this
rank's own part. n tokens with k routes each of h numbers of e bytes; E experts; R rows that come to a rank along ep, R' to all
ranks of its etp group; C slots of an expert for each rank.

    all-to-all   counts 8·E, and 8·E·etp over etp; rows n·k·h·e (without dropped ones) → R·h·e, back the same swapped; over
                 etp copies of R rows for each → R', back the same swapped
    padded       one number of 8 bytes where no capacity fixes C; E·C·h·e four times; over etp etp·E·C·h·e four times
    all-gather   routes 8·ep·n·k; rows ep·n·h·e and weights ep·n·k·p, of p bytes each, there and back; over etp all etp times

Source: the tables of ``instrument.expert``'s dispatchers; measured and predicted are compared call by call in the tests.

What its experts keep of one microbatch, beyond what its attention and norms do, follows from the rows that they compute: tensors
that autograd keeps, and places of rows, which the runtime keeps besides (``instrument/expert``). Of n tokens with k routes each
of h numbers of e bytes, weights and logits of w bytes, E experts, R rows of width f on this rank (with padding):

    router       logits n·E·w and weights n·k·w, chosen experts 8·n·k; of 16 bits its input again, n·h·w, and weights n·k·e
    rows         R·(h + 2·f)·e: what the experts get, and their inner layer before and after its activation; 4·f where it is gated
    all-to-all   n·k·h·e that came back, places 16·n·k, and 16·R where rows of several ranks are sorted by expert
    padded       the same, with places of E·C + 1 slots and n·k routes
    all-gather   R·h·e twice, R weights, 8·R places and 8 bytes for each route of all ranks
    shared MLP   n'·2·f'·e, or 4·f'; of its coefficients what they weigh

Where a forward runs in pieces (``instrument/expert/pieces.py``), what begins a piece is kept as well: the rows that came, those
that came back, and what crosses a cut and is kept by nothing else (a shared MLP's output, weights that are read with 16 bits).

From I to W a rank keeps R·2·(h + f)·e of its experts, n·E·w of the router's gradient and what the router reads, and the inputs
and output gradients of the shared MLP.

Tests hold them against what is alive after the forward, and after I.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pptrace.axes import Axis
from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.form import OF_OUR_GPT, ModelForm

INDEX_BYTES = 8
"""Bytes of a route or a count: int64."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer on ranks that share its experts, numbered with etp fastest, then ep.

    ``num_tokens`` is n; ``slots`` is C, which ``is_fixed`` by a capacity or agreed on by the ranks.
    """

    ep: int
    etp: int
    num_experts: int
    top_k: int
    hidden: int
    num_tokens: int
    item_bytes: int
    weight_bytes: int
    slots: int = 0
    is_fixed: bool = False

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.item_bytes


@dataclass(frozen=True, slots=True, order=True)
class ExpertCall:
    """One call: ``bytes`` as its mark has them, and what the rank receives of uneven parts (elsewhere 0)."""

    axis: Axis
    kind: str
    bytes: int
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of ``forwards`` forwards of a layer together: those that a rank hands in (``own``), those that come to it along ep
    (``arriving``) and to all ranks of its etp group (``gathered``), and E·C ``slots`` of padded buffers.
    """

    forwards: int
    own: int
    arriving: int
    gathered: int
    slots: int


LayerCalls = tuple[list[ExpertCall], list[ExpertCall], list[ExpertCall]]
"""Calls of a layer: those that a forward makes once, however often it is computed, those of each computation of it, and those of
its backward. Of several forwards together an entry is as many calls.
"""


def layer_calls(dispatcher: str, sizes: ExpertSizes, rows: LayerRows) -> LayerCalls:
    """The calls of a layer's forwards; none along an axis of one rank."""
    present = {Axis.EP: sizes.ep > 1, Axis.ETP: sizes.etp > 1}
    once, forward, backward = (
        [call for call in part if present[call.axis]] for part in _CALLS[dispatcher](sizes, rows)
    )
    return once, forward, backward


def _all_to_all(sizes: ExpertSizes, rows: LayerRows) -> LayerCalls:
    counts = INDEX_BYTES * sizes.num_experts * rows.forwards
    own, arriving, gathered = (num * sizes.row_bytes for num in (rows.own, rows.arriving, rows.gathered))
    copies = sizes.etp * arriving
    once = [ExpertCall(Axis.EP, "all_to_all", counts), ExpertCall(Axis.ETP, "all_gather", counts * sizes.etp)]
    there_and_back = [
        ExpertCall(Axis.EP, "all_to_all", own, arriving),
        ExpertCall(Axis.EP, "all_to_all", arriving, own),
        ExpertCall(Axis.ETP, "all_to_all", copies, gathered),
        ExpertCall(Axis.ETP, "all_to_all", gathered, copies),
    ]
    return once, there_and_back, there_and_back  # backward: the gradients of what came back, and of what set out


def _padded(sizes: ExpertSizes, rows: LayerRows) -> LayerCalls:
    num_bytes = rows.slots * sizes.row_bytes
    agreed = [ExpertCall(axis, "all_reduce", INDEX_BYTES * rows.forwards) for axis in (Axis.EP, Axis.ETP)]
    within = [ExpertCall(Axis.ETP, kind, sizes.etp * num_bytes) for kind in ("all_gather", "reduce_scatter")]
    there_and_back = [*[ExpertCall(Axis.EP, "all_to_all", num_bytes)] * 2, *within]
    return [] if sizes.is_fixed else agreed, there_and_back, there_and_back


def _all_gather(sizes: ExpertSizes, rows: LayerRows) -> LayerCalls:
    routes = rows.forwards * sizes.num_tokens * sizes.top_k
    once, forward, backward = [], [], []
    for axis, num in ((Axis.EP, sizes.ep), (Axis.ETP, sizes.ep * sizes.etp)):
        tokens, weights = num * rows.forwards * sizes.num_tokens * sizes.row_bytes, num * routes * sizes.weight_bytes
        once.append(ExpertCall(axis, "all_gather", num * routes * INDEX_BYTES))
        both = [ExpertCall(axis, kind, tokens) for kind in ("all_gather", "reduce_scatter")]
        forward += [*both, ExpertCall(axis, "all_gather", weights)]
        backward += [*both, ExpertCall(axis, "reduce_scatter", weights)]
    return once, forward, backward


_CALLS: Mapping[str, Callable[[ExpertSizes, LayerRows], LayerCalls]] = {
    "all-to-all": _all_to_all,
    "padded": _padded,
    "all-gather": _all_gather,
}


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
    form: ModelForm = OF_OUR_GPT

    def kept(self, rows: float) -> float:
        """Bytes with so many rows of this rank's experts."""
        num_bytes = self._router() + rows * (self.hidden + len(self.form.inner_tensors) * self.width) * self.item_bytes
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
        num_bytes = rows * (2 * self.hidden + self.form.num_matrices * self.width) * e
        num_bytes += self.num_tokens * self.num_experts * self.weight_bytes
        num_bytes += self._router_input()
        keeps_norm, is_gathered = self._reads_norm, self.held != self.between
        if options.shared_width:
            whole, outputs = self.held * self.hidden * e, options.shared.num_coefficients
            num_bytes += self.form.num_matrices * self.held * self.shared_width * e + whole + self.between * outputs * e
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
        inner = len(self.form.inner_tensors) * self.held * self.shared_width * e
        return inner + self.between * outputs * e + weighed

    def _losses(self) -> int:
        w, num_bytes = self.weight_bytes, 0
        if self.options.aux_loss:
            num_bytes += (self.num_tokens + self.sequences) * self.num_experts * w
            num_bytes += self.num_tokens * w * (self.options.scoring == "sigmoid")  # the sum that they are divided by
        if self.options.z_loss:
            num_bytes += self.num_tokens * w
            num_bytes += self.num_tokens * self.num_experts * w * (self.options.scoring != "softmax-after")
        return num_bytes
