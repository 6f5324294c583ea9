"""What ``[compression]`` changes on the way between server and clients.

The parameters of the common part travel down in a compact form (``tensors/compact_forms.py``). A
client sends up what its training changed: the difference between its parameters and the ones that
it received, in a compact form too. The server adds the difference to the parameters that it meant
to send, so what rounding took from the downlink is not lost in the run. A client adds what a
coarse form left out to its next difference (error feedback: Seide et al., 1-Bit Stochastic
Gradient Descent, Interspeech 2014; Karimireddy et al., ICML 2019, Algorithm 2).

    paper   here                              paper   here
    x_t     the common part's parameters      e_t     residual
    p_t     wanted                            C       Form.packed, then Form.unpacked

Everything else travels as it is: buffers, prototypes, generators, histograms and scalars, and the
parameters in a client's personal part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.compact_forms import Floats, Form, Shapes, form_of
from fedmodels.tensors.declared_counts import MAX_WEIGHT
from fedmodels.tensors.packed_weights import PackedWeights, layout_of, lease
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import Allocate, SharedPart

RESIDUAL = "residual/"
"""Prefix of what a client still owes, among the weights of its stored private state."""
MAX_ELEMENTS = 2**31
"""Places of ``top-k`` are int32."""
_EXACT = Floats(torch.float32)


@dataclass(frozen=True)
class Compression(SharedPart):
    """How the parameters of a run travel; by default as they are."""

    section, is_learnt = RESIDUAL, True
    down: Form = _EXACT
    up: Form = _EXACT
    feedback: bool = False
    """Whether clients keep residuals."""
    fetched: Shapes = field(default_factory=dict)
    """The parameters of the common part, whose form changes."""
    returned: Shapes = field(default_factory=dict)
    """Parameters of ``fetched`` that an upload holds too. Where there are none, uploads
    travel as they are."""

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Compression:
        """Return what the config of a run asks for.

        Raises:
            ConfigError: no parameter of the method travels both ways, or too many for ``top-k``.
        """
        table = run.experiment.compression
        if table is None or table.up == table.down == "float32":
            return cls()
        common, personal = method.payload_spec(run)
        fetched = _parameters(run, common)
        own = {**personal.required, **personal.optional}
        sent = _parameters(run, method.upload_spec(run))
        returned = {
            name: shape
            for name, shape in fetched.items()
            if sent.get(name) == shape and f"weights/{name}" not in own
        }
        if not returned:
            raise ConfigError(
                f"[compression]: no parameter travels both ways with method {method.name!r}; leave "
                "the table out"
            )
        up, down = form_of(table.up, table.share), form_of(table.down, table.share)
        count = sum(map(torch.Size.numel, map(torch.Size, returned.values())))
        if table.up == "top-k" and count >= MAX_ELEMENTS:
            raise ConfigError(f"[compression] up = 'top-k' is for nets below {MAX_ELEMENTS} values")
        feedback = table.feedback and up.is_coarse
        return cls(down, up, feedback, fetched, returned)

    @property
    def keeps(self) -> bool:
        """Whether clients keep residuals."""
        return self.feedback

    @property
    def changes_uploads(self) -> bool:
        """Whether uploads hold differences."""
        return bool(self.returned)

    # --- what may travel -------------------------------------------------------------------------

    def payload_spec(self, common: BundleSpec) -> BundleSpec:
        """Return the specification of a common part as it travels, from that of the part itself."""
        return _put_form(common, self.fetched, self.down)

    def upload_spec(self, upload: BundleSpec) -> BundleSpec:
        """Return the specification of an upload as it travels, from that of the upload itself."""
        return _put_form(upload, self.returned, self.up)

    # --- down ------------------------------------------------------------------------------------

    def sent(self, common: Bundle) -> Bundle:
        """Return the common part as it travels.

        Raises:
            PayloadError: a parameter does not fit into the form.
        """
        if self.down == _EXACT:
            return common
        wanted = {name: common.weights[name] for name in self.fetched}
        return _with(common, self.fetched, self.down.packed(wanted))

    def received(self, payload: Bundle) -> Bundle:
        """Return a payload as the method's client half gets it: both parts, in float32.

        Raises:
            PayloadError: the payload holds impossible values.
        """
        if self.down == _EXACT:
            return payload
        forms = self.down.specs(self.fetched)
        return _with(payload, forms, self.down.unpacked(payload.weights, self.fetched))

    # --- up --------------------------------------------------------------------------------------

    def returned_by(self, upload: Bundle, payload: Bundle, kept: Weights) -> tuple[Bundle, Weights]:
        """Return an upload as it travels, and the residual that its client keeps.

        ``kept`` holds the residual before, if there is one.

        Raises:
            PayloadError: a difference does not fit into the form.
        """
        if not self.returned:
            return upload, {}
        wanted = {name: upload.weights[name] - payload.weights[name] for name in self.returned}
        for name in self.returned if self.feedback else ():
            owed = kept.get(RESIDUAL + name)  # e_t; nothing before the first upload
            wanted[name] = wanted[name] if owed is None else wanted[name] + owed  # p_t
        packed = self.up.packed(wanted)
        residual = dict[str, Tensor]()
        if self.feedback:
            arrives = self.up.unpacked(packed, self.returned)  # C(p_t)
            residual = {RESIDUAL + name: wanted[name] - arrives[name] for name in self.returned}
        return _with(upload, self.returned, packed), residual  # e_{t+1} = p_t - C(p_t)

    def restored(self, sent: Bundle, common: Bundle, allocate: Allocate = lease) -> Bundle:
        """Return an upload as the method's server half gets it.

        Raises:
            PayloadError: the upload holds impossible values, or some that cannot travel down.
        """
        if not self.returned:
            return sent
        changed = self.up.unpacked(sent.weights, self.returned)
        forms = self.up.specs(self.returned)
        whole = {name: t for name, t in sent.weights.items() if name not in forms}
        names = tuple(sorted({*whole, *changed}))
        facts = [(torch.float32, tuple(changed[n].shape)) if n in changed else
                 (whole[n].dtype, tuple(whole[n].shape)) for n in names]  # fmt: skip
        layout = layout_of(tuple(facts))
        block = torch.from_numpy(np.frombuffer(allocate(layout.size), np.uint8))
        for name, place in zip(names, layout.views(layout.clear(block)), strict=True):
            if name in changed:
                torch.add(common.weights[name], changed[name], out=place)
                self._check_fits_down(name, place)
            else:
                place.copy_(whole[name])
        return replace(sent, weights=PackedWeights(names, layout, block))

    def _check_fits_down(self, name: str, parameter: Tensor) -> None:
        """Check that clients can get a parameter back: means of what fits do fit."""
        if self.down.most >= MAX_WEIGHT or not parameter.numel():
            return
        largest = float(parameter.abs().max())
        if not largest <= self.down.most:  # a NaN is wrong as well
            raise PayloadError(
                f"tensor 'weights/{name}' holds {largest:g} after the client's change, beyond "
                f"{self.down.most:g}: [compression] down carries no more"
            )


def _parameters(run: RunFacts, spec: BundleSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the net's float32 parameters that a bundle always holds."""
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(run.parameters):
        stated = spec.required.get(f"weights/{name}")
        if stated is not None and stated.dtype == torch.float32:
            found[name] = tuple(n for n in stated.shape if n is not None)
    return found


def _put_form(spec: BundleSpec, shapes: Shapes, form: Form) -> BundleSpec:
    """Return a specification in which the weights of these names have a form."""
    if not shapes or form == _EXACT:
        return spec
    replaced = {f"weights/{name}" for name in shapes}
    kept = {key: one for key, one in spec.required.items() if key not in replaced}
    new = {f"weights/{name}": one for name, one in form.specs(shapes).items()}
    return BundleSpec({**kept, **new}, spec.optional)


def _with(bundle: Bundle, without: Mapping[str, object], new: Weights) -> Bundle:
    """Return a bundle with new weights in place of those that ``without`` names."""
    kept = {name: tensor for name, tensor in bundle.weights.items() if name not in without}
    return replace(bundle, weights={**kept, **new})
