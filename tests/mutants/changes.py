"""Small wrong changes of Python code: every one a module can have, and the module with one of them."""

import ast
import copy
from typing import NamedTuple

SWAPPED = {
    getattr(ast, one): getattr(ast, other)
    for one, other in (
        *(("Lt", "LtE"), ("LtE", "Lt"), ("Gt", "GtE"), ("GtE", "Gt"), ("Eq", "NotEq"), ("NotEq", "Eq")),
        *(("Is", "IsNot"), ("IsNot", "Is"), ("In", "NotIn"), ("NotIn", "In"), ("And", "Or"), ("Or", "And")),
        *(("Add", "Sub"), ("Sub", "Add"), ("Mult", "Div"), ("Div", "Mult"), ("FloorDiv", "Mult")),
        *(("Mod", "Mult"), ("Pow", "Mult"), ("BitAnd", "BitOr"), ("BitOr", "BitAnd")),
    )
}
CALLED = {
    one: other
    for pair in (
        *(("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("clamp_min", "clamp_max")),
        *(("any", "all"), ("ones", "zeros"), ("ones_like", "zeros_like")),
    )
    for one, other in (pair, pair[::-1])
}
ESTIMATES = {"work"}
"""Functions of whose numbers only speed depends; benchmarks hold them."""


class Change(NamedTuple):
    """Which of a module's changes it is, the function it is in, what becomes of a part of it, its line."""

    number: int
    where: str
    before: str
    after: str
    line: int

    def __str__(self) -> str:
        return f"{self.where}: {self.before} -> {self.after}"


class _Walk(ast.NodeTransformer):
    """Visits what may be changed, in the order of the text, and changes the one of number `chosen`."""

    def __init__(self, chosen: int | None) -> None:
        self.chosen, self.found, self.inside = chosen, [], []

    def offer(self, node: ast.AST, put) -> ast.AST:
        """The node, or the one that `put` makes of a copy of it where its turn has come."""
        if not self.inside:
            return node
        new = put(copy.deepcopy(node))
        number = len(self.found)
        told = [" ".join(ast.unparse(x).split())[:120] for x in (node, new)]
        self.found.append(Change(number, ".".join(self.inside), *told, node.lineno))
        return ast.copy_location(new, node) if number == self.chosen else node

    # --- what is left alone: text, types, defaults, what errors say, estimates of cost, checks of lengths by `zip`

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.outer = node.name
        node.body = [self.visit(part) if isinstance(part, ast.FunctionDef) else part for part in node.body]
        self.outer = None
        return node

    outer = None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in ESTIMATES:
            return node
        self.inside.append(node.name if self.outer is None or self.inside else f"{self.outer}.{node.name}")
        docstring = ast.get_docstring(node, clean=False) is not None
        node.body = node.body[:docstring] + [self.visit(part) for part in node.body[docstring:]]
        self.inside.pop()
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "strict" else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    # --- what is changed

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)

        def put(new: ast.Compare) -> ast.AST:
            new.ops[0] = SWAPPED[type(new.ops[0])]()
            return new

        return self.offer(node, put)

    def _operator(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)

        def put(new: ast.AST) -> ast.AST:
            new.op = SWAPPED[type(new.op)]()
            return new

        return self.offer(node, put) if type(node.op) in SWAPPED else node

    visit_BinOp = visit_BoolOp = visit_AugAssign = _operator

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return self.offer(node, lambda new: ast.UnaryOp(ast.USub(), ast.Constant(new.operand.value + 1)))
        self.generic_visit(node)
        return self.offer(node, lambda new: new.operand)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, bool | int | float):
            return node
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        return self.offer(node, lambda new: ast.Constant(other))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = "attr" if isinstance(node.func, ast.Attribute) else "id"
        called = getattr(node.func, name, None)
        if called not in CALLED:
            return node

        def put(new: ast.Call) -> ast.AST:
            setattr(new.func, name, CALLED[called])
            return new

        return self.offer(node, put)

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        return self._negated(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return self._negated(node)

    def _negated(self, node: ast.If | ast.IfExp) -> ast.AST:
        test = self.offer(node.test, lambda new: ast.UnaryOp(ast.Not(), new))
        node.test = ast.fix_missing_locations(test)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """A statement for what it does, not for what it is: left out."""
        self.generic_visit(node)
        return self.offer(node, lambda new: ast.Pass())


def changes(source: str) -> list[Change]:
    """All changes that a module's text can have."""
    walk = _Walk(None)
    walk.visit(ast.parse(source))
    return walk.found


def changed(source: str, number: int, path: str):
    """The code of the module with its change `number`."""
    walk = _Walk(number)
    tree = walk.visit(ast.parse(source))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
