//! Functions and structs of the crates that are hard to read where they are used.

use syn::visit::{self, Visit};
use syn::{
    Block, Expr, FnArg, Ident, ImplItemFn, ItemFn, ItemImpl, ItemMod, ItemStruct, Signature, Stmt, TraitItemFn, Type,
};

use crate::source::{Modules, Place, for_tests};

/// What was found, in the order of files and lines.
#[derive(Default)]
pub(crate) struct Items {
    file: String,
    /// Functions with a parameter of type `bool`.
    pub(crate) booleans: Vec<Place>,
    /// Functions that only call another one with the same arguments.
    pub(crate) forwarders: Vec<Place>,
    /// Structs of 14 fields and more.
    pub(crate) fields: Vec<Place>,
}

pub(crate) fn find(modules: &Modules) -> Items {
    let mut all: Vec<_> = modules.0.values().filter(|module| module.path.starts_with("crates/")).collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    let mut found = Items::default();
    for module in all {
        found.file.clone_from(&module.path);
        module.items.iter().for_each(|item| found.visit_item(item));
    }
    found
}

impl Items {
    fn place(&self, name: &Ident) -> Place {
        Place { file: self.file.clone(), line: name.span().start().line, what: name.to_string() }
    }

    /// A function comes with its body, if it has one.
    fn function(&mut self, signature: &Signature, body: Option<&Block>) {
        let place = self.place(&signature.ident);
        if body.is_some_and(|body| is_forwarder(signature, body)) {
            self.forwarders.push(place.clone());
        }
        if signature.inputs.iter().any(is_boolean) {
            self.booleans.push(place);
        }
    }
}

impl<'ast> Visit<'ast> for Items {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if !for_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !for_tests(&item.attrs) {
            self.function(&item.sig, Some(&item.block));
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !for_tests(&item.attrs) {
            self.function(&item.sig, Some(&item.block));
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        self.function(&item.sig, item.default.as_ref());
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        if !for_tests(&item.attrs) && item.fields.len() >= 14 {
            let place = self.place(&item.ident);
            self.fields.push(place);
        }
    }
}

fn is_boolean(argument: &FnArg) -> bool {
    matches!(argument, FnArg::Typed(typed) if matches!(&*typed.ty, Type::Path(path) if path.path.is_ident("bool")))
}

/// Whether a body is one call on what is there already: parameters, fields of them, constants.
fn is_forwarder(signature: &Signature, block: &Block) -> bool {
    let [Stmt::Expr(expression, _)] = block.stmts.as_slice() else { return false };
    let arguments = match bare(expression) {
        Expr::MethodCall(call) if is_plain(&call.receiver) => &call.args,
        Expr::Call(call) if matches!(&*call.func, Expr::Path(path) if !is_constructor(path)) => &call.args,
        _ => return false,
    };
    !signature.inputs.is_empty() && arguments.iter().all(is_plain)
}

/// An expression without what is written around a call: `?`, `.await`, `&`, brackets.
fn bare(expression: &Expr) -> &Expr {
    match expression {
        Expr::Paren(inner) => bare(&inner.expr),
        Expr::Try(inner) => bare(&inner.expr),
        Expr::Reference(inner) => bare(&inner.expr),
        Expr::Unsafe(inner) => match inner.block.stmts.as_slice() {
            [Stmt::Expr(expression, _)] => bare(expression),
            _ => expression,
        },
        _ => expression,
    }
}

/// Whether an expression is a name, a literal, or a field of one.
fn is_plain(expression: &Expr) -> bool {
    match bare(expression) {
        Expr::Path(_) | Expr::Lit(_) => true,
        Expr::Field(field) => is_plain(&field.base),
        _ => false,
    }
}

/// Whether a call makes a value of a struct or an enum.
fn is_constructor(path: &syn::ExprPath) -> bool {
    let last = path.path.segments.last().map(|segment| segment.ident.to_string());
    last.is_some_and(|name| name.starts_with(char::is_uppercase))
}
