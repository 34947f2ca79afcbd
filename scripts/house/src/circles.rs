//! Circles of files: groups in one folder in which each file uses another one, directly or through
//! others.
//!
//! A folder's members are its files, each together with the folder of its name. A member uses
//! another one where a path in it leads to an item there. Paths are followed through modules, `use`
//! and `pub use` to the file that defines the item. A file and those in the folder of its name may
//! use each other: they are one member. The circles are the strongly connected components of more
//! than one member, found by reachability, since folders are small.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Item, UseTree, Visibility};

use crate::source::{Module, Modules, Place, attributes, for_tests};

/// A path as it is written, and the names it is split into.
type Names = Vec<String>;

/// Which member of a folder uses which, with a file and a path in it that show it.
type Edges = BTreeMap<(String, String), (String, String)>;

/// What a file declares and says.
struct Scope {
    items: BTreeSet<String>,
    /// Name → the path that a `use` gives it.
    imports: HashMap<String, Names>,
    globs: Vec<Names>,
    /// Every path in the file, those of its `use` items among them.
    paths: BTreeSet<Names>,
}

pub(crate) fn find(modules: &Modules) -> Vec<Place> {
    let scopes: HashMap<&Names, Scope> = modules.0.iter().map(|(name, module)| (name, Scope::of(module))).collect();
    let mut folders: BTreeMap<&[String], Edges> = BTreeMap::new();
    for (name, module) in &modules.0 {
        for path in &scopes[name].paths {
            let Some(target) = resolve(&scopes, name, path, 0) else { continue };
            let common = name.iter().zip(&target).take_while(|(a, b)| a == b).count();
            // One of them is the other one's parent, or they are of two crates.
            if common == 0 || common == name.len() || common == target.len() {
                continue;
            }
            let edge = (name[common].clone(), target[common].clone());
            let said = (module.path.clone(), path.join("::"));
            folders.entry(&name[..common]).or_default().entry(edge).or_insert(said);
        }
    }
    folders.into_iter().flat_map(|(folder, edges)| circles(folder, &edges)).collect()
}

/// The circles of a folder.
fn circles(folder: &[String], edges: &Edges) -> Vec<Place> {
    let members: BTreeSet<&String> = edges.keys().flat_map(|(from, to)| [from, to]).collect();
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        members.iter().map(|from| (*from, reach(from, edges))).collect();
    let mut placed = BTreeSet::new();
    let mut places = Vec::new();
    for member in &members {
        if placed.contains(member) || !reached[member].contains(*member) {
            continue;
        }
        let circle: BTreeSet<&String> =
            reached[member].iter().copied().filter(|other| reached[other].contains(*member)).collect();
        let uses = edges.iter().filter(|((from, to), _)| circle.contains(from) && circle.contains(to));
        let uses: Vec<String> = uses.map(|((from, to), (_, path))| format!("{from} -> {to} ({path})")).collect();
        let names: Vec<&str> = circle.iter().map(|name| name.as_str()).collect();
        let what = format!("{} use each other: {}", names.join(", "), uses.join("; "));
        places.push(Place { file: folder.join("/"), line: 1, what });
        placed.extend(circle);
    }
    places
}

/// All members that one uses, directly or through others.
fn reach<'a>(from: &'a String, edges: &'a Edges) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from];
    while let Some(member) = next.pop() {
        for ((_, to), _) in edges.iter().filter(|((user, _), _)| user == member) {
            if reached.insert(to) {
                next.push(to);
            }
        }
    }
    reached
}

/// The module that defines what a path means in a module.
fn resolve(scopes: &HashMap<&Names, Scope>, module: &Names, path: &[String], depth: usize) -> Option<Names> {
    let (first, mut rest) = path.split_first()?;
    // Re-exports that name each other.
    if depth > 20 {
        return None;
    }
    let mut at = module.clone();
    match first.as_str() {
        "crate" => at.truncate(1),
        "self" => {}
        "super" => {
            at.pop();
            while let Some(more) = rest.strip_prefix(&["super".to_owned()]) {
                at.pop();
                rest = more;
            }
        }
        _ => return step(scopes, &at, path, depth),
    }
    if rest.is_empty() { scopes.contains_key(&at).then_some(at) } else { step(scopes, &at, rest, depth) }
}

/// The same for a path that begins with a name of the module.
fn step(scopes: &HashMap<&Names, Scope>, module: &Names, path: &[String], depth: usize) -> Option<Names> {
    let scope = scopes.get(module)?;
    let (first, rest) = path.split_first()?;
    let mut child = module.clone();
    child.push(first.clone());
    if scopes.contains_key(&child) {
        return if rest.is_empty() { Some(child) } else { step(scopes, &child, rest, depth) };
    }
    if scope.items.contains(first) {
        return Some(module.clone());
    }
    if let Some(import) = scope.imports.get(first) {
        let whole: Names = import.iter().chain(rest).cloned().collect();
        return resolve(scopes, module, &whole, depth + 1);
    }
    scope.globs.iter().find_map(|glob| {
        let whole: Names = glob.iter().chain(path).cloned().collect();
        resolve(scopes, module, &whole, depth + 1)
    })
}

impl Scope {
    fn of(module: &Module) -> Self {
        let mut scope =
            Self { items: BTreeSet::new(), imports: HashMap::new(), globs: Vec::new(), paths: BTreeSet::new() };
        for item in &module.items {
            scope.read(item);
        }
        scope
    }

    fn read(&mut self, item: &Item) {
        if for_tests(attributes(item)) {
            return;
        }
        let name = match item {
            Item::Use(item) => {
                // A re-export is no use by this file: whoever names it uses what it leads to.
                let counts = matches!(item.vis, Visibility::Inherited);
                return self.import(&mut Vec::new(), &item.tree, counts);
            }
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            Item::Macro(item) => item.ident.as_ref(),
            _ => None,
        };
        self.items.extend(name.map(ToString::to_string));
        self.scan(item.to_token_stream());
    }

    fn import(&mut self, before: &mut Names, tree: &UseTree, counts: bool) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.import(before, &path.tree, counts);
                before.pop();
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(before, tree, counts)),
            UseTree::Glob(_) => self.globs.push(before.clone()),
            UseTree::Name(name) => self.bind(before, &name.ident.to_string(), &name.ident.to_string(), counts),
            UseTree::Rename(rename) => self.bind(before, &rename.ident.to_string(), &rename.rename.to_string(), counts),
        }
    }

    fn bind(&mut self, before: &Names, item: &str, name: &str, counts: bool) {
        let mut path = before.clone();
        let name = if item == "self" { path.last().cloned().unwrap_or_default() } else { name.to_owned() };
        if item != "self" {
            path.push(item.to_owned());
        }
        if counts {
            self.paths.insert(path.clone());
        }
        self.imports.insert(name, path);
    }

    /// Notes each `a::b::c` of more than one name.
    fn scan(&mut self, tokens: TokenStream) {
        let mut path: Names = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.note(&mut path);
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                TokenTree::Group(group) => {
                    self.note(&mut path);
                    colons = 0;
                    self.scan(group.stream());
                }
                _ => {
                    self.note(&mut path);
                    colons = 0;
                }
            }
        }
        self.note(&mut path);
    }

    fn note(&mut self, path: &mut Names) {
        let path = std::mem::take(path);
        if path.len() > 1 {
            self.paths.insert(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> Vec<Place> {
        let module = |(name, text): &(&str, &str)| {
            let items = syn::parse_file(text).unwrap().items;
            let name = ["crates/x", name].into_iter().filter(|part| !part.is_empty()).map(str::to_owned).collect();
            (name, Module { path: String::new(), items })
        };
        find(&Modules(files.iter().map(module).collect()))
    }

    #[test]
    fn files_that_use_each_other_through_a_re_export_are_a_circle() {
        let root = ("", "mod a; mod b; mod c; pub use a::A;");
        let (a, c) = (("a", "use crate::c::C; pub struct A(C);"), ("c", "pub struct C;"));
        let found = folder(&[root, a, ("b", "fn b(_: crate::A) {}"), c]);
        assert!(found.is_empty(), "b uses a, and a uses c");
        let found =
            folder(&[root, a, ("b", "pub fn b(_: crate::A) {}"), ("c", "pub struct C; fn c() { crate::b::b() }")]);
        assert!(found[0].what.starts_with("a, b, c use each other: "), "{}", found[0].what);
    }
}
