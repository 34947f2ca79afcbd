//! The tracked files: which ones count, and the parsed modules of each crate.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use syn::{Attribute, Item, Meta};

/// A place in a file.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) file: String,
    pub(crate) line: usize,
    pub(crate) what: String,
}

/// The paths that git tracks, from the top of the tree.
pub(crate) struct Files(Vec<String>);

/// One file of Rust, without what is compiled for tests only.
pub(crate) struct Module {
    pub(crate) path: String,
    pub(crate) items: Vec<Item>,
}

/// All files of Rust outside tests, by their module's name: `["crates/one", "table"]`.
pub(crate) struct Modules(pub(crate) HashMap<Vec<String>, Module>);

impl Files {
    pub(crate) fn tracked() -> Result<Self> {
        let output = Command::new("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]).output()?;
        ensure!(output.status.success(), "git does not list the files");
        let text = String::from_utf8(output.stdout)?;
        Ok(Self(text.lines().filter(|path| Path::new(path).exists()).map(str::to_owned).collect()))
    }

    /// Lines of code outside tests.
    pub(crate) fn lines(&self) -> Result<usize> {
        let code = |path: &&String| [".rs", ".c", ".h", ".sh"].iter().any(|end| path.ends_with(end)) && !is_test(path);
        self.0.iter().filter(code).map(|path| Ok(std::fs::read_to_string(path)?.lines().count())).sum()
    }

    /// Words of the documents.
    pub(crate) fn words(&self) -> Result<usize> {
        let document = |path: &&String| {
            ["README.md", "CHANGELOG.md"].contains(&path.as_str())
                || (path.starts_with("docs/") && path.ends_with(".md"))
        };
        self.0.iter().filter(document).map(|path| Ok(std::fs::read_to_string(path)?.split_whitespace().count())).sum()
    }

    pub(crate) fn parse(&self) -> Result<Modules> {
        let mut modules = HashMap::new();
        for path in self.0.iter().filter(|path| path.ends_with(".rs") && !is_test(path)) {
            let Some((krate, module)) = path.split_once("/src/") else { continue };
            let text = std::fs::read_to_string(path)?;
            let file = syn::parse_file(&text).with_context(|| format!("{path} is no Rust"))?;
            let mut name = vec![krate.to_owned()];
            let inner = PathBuf::from(module).with_extension("");
            name.extend(inner.iter().map(|part| part.to_string_lossy().into_owned()));
            if let [_, root] = name.as_slice()
                && ["lib", "main"].contains(&root.as_str())
            {
                name.pop();
            }
            let items = file.items.into_iter().filter(|item| !for_tests(attributes(item))).collect();
            modules.insert(name, Module { path: path.clone(), items });
        }
        Ok(Modules(modules))
    }
}

/// Whether a path is that of tests.
fn is_test(path: &str) -> bool {
    path.split('/').any(|part| ["test", "tests", "test.rs", "tests.rs"].contains(&part))
}

/// Whether an item is compiled for tests only.
pub(crate) fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test" || condition.starts_with("all(test") || condition.starts_with("any(test")
        }
        Meta::Path(path) => path.is_ident("test"),
        _ => false,
    })
}

/// The attributes of an item.
pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
