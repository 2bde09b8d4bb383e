{{/*
The configuration file of one component, from the values and from what the chart decides.
All take (dict "root" $ "component" "router" | "prefill" | "decode" | "gateway").
*/}}

{{/* The most workers of a pool: what links and pairs are laid out for. */}}
{{- define "pdserve.most" -}}
{{- max (.replicas | default 0 | int) (.maxReplicas | int) }}
{{- end }}

{{/* What the user set, the component's own before everybody's; JSON. */}}
{{- define "pdserve.settings" -}}
{{- $own := (index .root.Values .component).config }}
{{- mustMergeOverwrite (dict) (deepCopy .root.Values.config) (deepCopy $own) | toJson }}
{{- end }}

{{/* What the routers' certificate is for. */}}
{{- define "pdserve.serverName" -}}
{{- .Values.tls.serverName | default (printf "%s.%s.svc" (include "pdserve.fullname" .) .Release.Namespace) }}
{{- end }}

{{/* All settings of the file; JSON. */}}
{{- define "pdserve.config" -}}
{{- $values := .root.Values }}
{{- $any := eq $values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0" }}
{{- $prefill := include "pdserve.most" $values.prefill | int }}
{{- $decode := include "pdserve.most" $values.decode | int }}
{{- $cluster := dict }}
{{- if ne .component "gateway" }}
{{- $_ := set $cluster "secret_file" "/etc/pdserve/secret/secret" }}
{{- end }}
{{- if $values.insecure }}
{{- $_ := set $cluster "insecure" true }}
{{- end }}
{{- $tls := dict }}
{{- $derived := dict }}
{{- $decided := dict "cluster" $cluster }}
{{- if eq .component "router" }}
{{- $router := dict "listen" (printf "%s:50051" $any) "workers_listen" (printf "%s:50052" $any) }}
{{- if $values.apiKeys.existingSecret }}
{{- $_ := set $router "keys_file" "/etc/pdserve/keys/keys.toml" }}
{{- end }}
{{- if and $values.model.onRouters $values.model.name }}
{{- $_ := set $router "model" $values.model.name }}
{{- end }}
{{- $_ := set $decided "router" $router }}
{{- $_ := set $derived "router" (dict "pairs_per_prefill" (max 8 $decode) "drain_delay_s" 5.0) }}
{{- if $values.tls.routers }}
{{- $_ := set $tls "cert_file" "/etc/pdserve/tls/tls.crt" }}
{{- $_ := set $tls "key_file" "/etc/pdserve/tls/tls.key" }}
{{- end }}
{{- if $values.tls.workers }}
{{- $_ := set $tls "ca_file" "/etc/pdserve/authorities/ca.crt" }}
{{- end }}
{{- if $values.tls.clientAuthorities }}
{{- $_ := set $tls "client_ca_file" "/etc/pdserve/client-authorities/ca.crt" }}
{{- end }}
{{- if $values.router.http }}
{{- $_ := set $decided "http" (dict "listen" (printf "%s:8000" $any)) }}
{{- end }}
{{- else if eq .component "gateway" }}
{{- $_ := set $decided "http" (dict "listen" (printf "%s:8000" $any)) }}
{{- $_ := set $derived "router" (dict "drain_delay_s" 5.0) }}
{{- if $values.tls.gateways }}
{{- $_ := set $tls "cert_file" "/etc/pdserve/tls/tls.crt" }}
{{- $_ := set $tls "key_file" "/etc/pdserve/tls/tls.key" }}
{{- end }}
{{- else }}
{{- $routers := printf "%s-routers.%s.svc:50052" (include "pdserve.fullname" .root) .root.Release.Namespace }}
{{- $_ := set $decided "worker" (dict "routers" (list $routers) "model" $values.model.name) }}
{{- /* A worker may be given the other role, and each pool has one pod more during a rollout. */}}
{{- $_ := set $derived "worker" (dict "max_links" (max 16 (add $prefill $decode 2))) }}
{{- if $values.tls.routers }}
{{- $_ := set $tls "ca_file" "/etc/pdserve/authorities/ca.crt" }}
{{- $_ := set $tls "server_name" (include "pdserve.serverName" .root) }}
{{- end }}
{{- if $values.tls.workers }}
{{- $_ := set $tls "cert_file" "/etc/pdserve/tls/tls.crt" }}
{{- $_ := set $tls "key_file" "/etc/pdserve/tls/tls.key" }}
{{- end }}
{{- with $values.tls.workerName }}
{{- $_ := set $tls "worker_name" . }}
{{- end }}
{{- end }}
{{- if $tls }}
{{- $_ := set $decided "tls" $tls }}
{{- end }}
{{- $_ := set $derived "log" (dict "format" "json") }}
{{- mustMergeOverwrite (dict) $derived (include "pdserve.settings" . | fromJson) $decided | toJson }}
{{- end }}

{{/* The same as TOML. Whole numbers are written as such, as the values of Helm are all floats. */}}
{{- define "pdserve.toml" -}}
{{- range $table, $keys := include "pdserve.config" . | fromJson }}
[{{ $table }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ include "pdserve.tomlValue" $value }}
{{- end }}
{{ end }}
{{- end }}

{{- define "pdserve.tomlValue" -}}
{{- if or (kindIs "string" .) (kindIs "slice" .) }}
{{- toJson . }}
{{- else if kindIs "bool" . }}
{{- . }}
{{- else if eq (floor .) (float64 .) }}
{{- int64 . }}
{{- else }}
{{- toJson . }}
{{- end }}
{{- end }}

{{/*
Seconds until a pod that was asked to stop is killed: what a drain may take (timeouts.drain_s, then timeouts.lease_s for
the leases of what it ended), and 10 for its last words and the start of the signal.
*/}}
{{- define "pdserve.graceSeconds" -}}
{{- $config := include "pdserve.config" . | fromJson }}
{{- $drain := dig "timeouts" "drain_s" 60.0 $config }}
{{- $lease := dig "timeouts" "lease_s" 5.0 $config }}
{{- /* Nodes learn late that a pod ends, and lead clients to its router or gateway until then. */}}
{{- $delay := has .component (list "router" "gateway") | ternary (dig "router" "drain_delay_s" 0.0 $config) 0.0 }}
{{- $least := add (ceil (addf $drain $lease $delay)) 10 | int }}
{{- $given := (index .root.Values .component).terminationGracePeriodSeconds }}
{{- if and (not (kindIs "invalid" $given)) (lt (int $given) $least) }}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: a drain may take %d (timeouts.drain_s + timeouts.lease_s%s + 10); leave it out, or lower timeouts.drain_s" .component (int $given) $least (has .component (list "router" "gateway") | ternary " + router.drain_delay_s" "")) }}
{{- end }}
{{- kindIs "invalid" $given | ternary $least $given | int }}
{{- end }}
