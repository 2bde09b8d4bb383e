#!/usr/bin/env bash
# Builds a real Kubernetes control plane for `make test-k8s`, where neither a cluster nor an image registry is at hand.
#
#   tests/support/kube/build_control_plane.sh [CACHE]      (default: PDSERVE_TOOLS_DIR, else ~/.cache/pdserve-tools)
#
# kube-apiserver, kube-controller-manager and kube-scheduler 1.20.2 are compiled from Debian 12's source package, which
# has all that they import; Go 1.19 and etcd come as Debian packages that are unpacked, not installed. Needs apt and
# dpkg (any Debian or Ubuntu), 4.5 GB of disk for a while and 270 MB afterwards; about 9 CPU minutes and 125 MB of
# downloads. No root. Prints the folder that holds the four programs; a second call finds it made.
#
# MIRROR=… takes another Debian mirror than the one this machine uses.
set -euo pipefail

suite=bookworm
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
version=1.20.2
go=1.19
programs=(kube-controller-manager kube-scheduler kube-apiserver)

note() { echo "$(date +%T) $*" >&2; }
fail() { note "error: $*"; exit 1; }

cache=${1:-${PDSERVE_TOOLS_DIR:-$HOME/.cache/pdserve-tools}}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
made=$cache/kubernetes-$version
build=$made.build

found_made() {
    [ -e "$made/complete" ] && echo "$made"
}

for tool in apt-get apt-cache dpkg flock tar; do
    command -v $tool >/dev/null || fail "this needs $tool"
done
# Two callers make it once. The lock isn't inherited by what runs below (9>&-), so a stray compiler doesn't hold it.
exec 9>"$made.lock"
flock 9
found_made && exit 0
[ "$(df -Pm "$cache" | awk 'END { print $4 }')" -ge 4500 ] || fail "$cache has less than 4500 MB free"
rm -rf "$build"
mkdir -p "$build"/{apt/lists/partial,apt/cache/archives/partial,packages,root,tmp}
trap 'rm -rf "$build"' EXIT

# --- fetch: an apt of its own (lists, caches, sources), with the machine's proxies and keys
mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' "Codename: $suite" "Created-By: Packages" | head -1)}
[ -n "$mirror" ] || fail "this machine has no source of Debian 12 packages: give MIRROR=…"
signed=
if [ -e $keyring ]; then signed="[signed-by=$keyring] "; fi
printf "deb %s$mirror $suite main\ndeb-src %s$mirror $suite main\n" "$signed" "$signed" >"$build/apt/sources.list"
own_apt=(-o Dir::Etc::SourceList="$build/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$build/apt/lists" -o Dir::Cache="$build/apt/cache"
    -o Acquire::Languages=none -o Acquire::Retries=3 -o APT::Sandbox::User=)
note "fetching from $mirror"
cd "$build/packages"
apt-get -qq "${own_apt[@]}" update >&2 9>&-
source=$(apt-cache "${own_apt[@]}" showsrc kubernetes 2>/dev/null \
    | awk -v has="really$version" '$1 == "Version:" && index($2, has) { print $2 }' | sort -V | tail -1)
[ -n "$source" ] || fail "$mirror $suite has no source package of Kubernetes $version"
apt-get -qq "${own_apt[@]}" source --download-only "kubernetes=$source" >&2 9>&-
apt-get -qq "${own_apt[@]}" download "golang-$go-go" "golang-$go-src" etcd-server \
    golang-github-modern-go-reflect2-dev >&2 9>&-

# --- unpack
tree=$build/gopath/src/k8s.io/kubernetes
mkdir -p "$tree"
for package in ./*.deb; do dpkg -x "$package" "$build/root"; done
tar xzf kubernetes_*.orig.tar.gz -C "$tree" --strip-components=1
# The reflect2 1.0.1 inside crashes under Go 1.18 and later when the first custom resource is made.
rm -rf "$tree/vendor/github.com/modern-go/reflect2"
cp -rL "$build/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$tree/vendor/github.com/modern-go/"

# --- compile: in GOPATH mode, so nothing of the caller's Go is used
for name in $(compgen -e GO); do unset "$name"; done
export GOENV=off GO111MODULE=off GOTOOLCHAIN=local CGO_ENABLED=0
export GOROOT=$build/root/usr/lib/go-$go GOPATH=$build/gopath GOCACHE=$build/gocache GOTMPDIR=$build/tmp
export PATH=$GOROOT/bin:$PATH
cd "$tree"
# The one generated file that the source package lacks is made by the tree's own generator, from the packages marked so.
note "generating the OpenAPI definitions"
go build -o "$build/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen 9>&-
marked=$(grep -rlE '^// *\+k8s:openapi-gen=' --include='*.go' pkg staging/src \
    | grep -vE 'zz_generated|/k8s\.io/(code-generator|sample-apiserver)/' | xargs -n1 dirname | LC_ALL=C sort -u \
    | sed -e 's|^staging/src|k8s.io/kubernetes/vendor|' -e 's|^pkg|k8s.io/kubernetes/pkg|' | paste -sd,)
"$build/openapi-gen" --input-dirs "$marked" --output-base "$GOPATH/src" -O zz_generated.openapi \
    --output-package k8s.io/kubernetes/pkg/generated/openapi --report-filename "$build/violations" \
    --go-header-file vendor/k8s.io/code-generator/hack/boilerplate.go.txt >"$build/openapi-gen.log" 2>&1 9>&- \
    || { tail -5 "$build/openapi-gen.log" >&2; fail "openapi-gen failed"; }
named="-s -w"
for package in component-base/version client-go/pkg/version; do
    for part in "gitVersion=v$version" gitMajor=1 gitMinor=20; do
        named+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.$part"
    done
done
mkdir "$build/made"
for program in "${programs[@]}"; do
    note "compiling $program"
    go build -trimpath -ldflags "$named" -o "$build/made/$program" "./cmd/$program" 9>&-
done

# --- keep
cp "$build/root/usr/bin/etcd" "$build/made/"
cp LICENSE "$build/made/LICENSE.kubernetes"
cp "$build/root/usr/share/doc/etcd-server/copyright" "$build/made/LICENSE.etcd"
"$build/made/kube-apiserver" --version >&2
"$build/made/etcd" --version >&2
touch "$build/made/complete"
rm -rf "$made"
mv "$build/made" "$made"
found_made
