"""Times of shapes, for tests of the search."""

from adtp_export.pipeline.tune.shapes import RETENTIONS, Arm, Table, Time, depths


def times(layers=6, int8=0.5, first=1.0, site="0.ffn"):
    """Times as a machine might give: layers take what the tokens in them take, `first` of them all tokens, and INT8 takes a share of it."""
    found = []
    for depth in depths(layers):
        for precision, factor in (("fp32", 1.0), ("int8", int8)):
            found.append(Time(Arm(depth), precision, factor * (1 + 10 * depth)))
            for retention in RETENTIONS if depth > 1 else ():
                ms = factor * (1 + 10 * (first + retention * (depth - first)))
                found.append(Time(Arm(depth, site, retention), precision, ms))
    return Table(found)
